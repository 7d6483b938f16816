"""Programs with models of sequences: names in texts, translation, language."""

from __future__ import annotations

from programs.corpus.program import Program

DATA = ("{here}/sequence_data.py {data}/sequences",)
OWN = "--data={data}/sequences --model-dir={model_dir} --batch-size={batch_size} --steps={steps}"

PROGRAMS = (
    Program(
        "lstm_crf", "own", "Apache-2.0", f"lstm_crf.py {OWN}", options="--v1", prepare=DATA
    ),
    Program(
        "lstm_crf_averages",
        "own",
        "Apache-2.0",
        f"lstm_crf.py {OWN} --averages",
        options="--v1",
        prepare=DATA,
    ),
    Program(
        "with_bert_base",
        "bert-base==0.0.9",
        "MIT",
        "with_bert_base.py -data_dir={data}/sequences -bert_config_file={data}/sequences/bert.json "
        "-vocab_file={data}/sequences/vocab.txt -output_dir={model_dir} -init_checkpoint= "
        "-max_seq_length=16 -batch_size={batch_size} -num_train_epochs={epochs} -dropout_rate=1 "
        "-learning_rate=0.001 -clean=",
        options="--v1",
        prepare=DATA,
    ),
    Program(
        "with_xlnet",
        "xlnet-tensorflow==1.1.2",
        "Apache-2.0",
        "with_xlnet.py --data_dir={data}/sequences --model_dir={model_dir} "
        "--output_dir={directory}/records --model_config_path={data}/sequences/xlnet.json "
        "--spiece_model_file={data}/sequences/pieces.model --train_steps={steps} "
        "--train_batch_size={batch_size}",
        options="--v1",
        prepare=DATA,
    ),
    Program(
        "opennmt",
        "OpenNMT-tf==1.25.3",
        "MIT",
        "-m opennmt.bin.main train_and_eval --model={here}/opennmt_model.py --data_dir="
        "{data}/sequences --run_dir={directory} "
        "--config={data}/sequences/translation-{batch_size}.yml",
        options="--v1",
        prepare=DATA,
    ),
)
