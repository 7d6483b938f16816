"""Programs with models of sequences: names in texts, translation, language."""

from __future__ import annotations

from programs.corpus.program import Program, driver

DATA = ("{here}/sequence_data.py {data}/sequences",)
TAGGER = "lstm_crf.py --data={data}/sequences"
T2T = "--problem=algorithmic_identity_binary40 --data_dir={data}/t2t"

PROGRAMS = (
    driver("lstm_crf", "own, as tf_ner", TAGGER, options="--v1", prepare=DATA),
    driver(
        "lstm_crf_averages",
        "own, as tf_ner",
        f"{TAGGER} --averages",
        options="--v1",
        prepare=DATA,
    ),
    Program(
        "with_bert_base",
        "bert-base==0.0.9",
        "with_bert_base.py -data_dir={data}/sequences -output_dir={model_dir} -clean= "
        "-bert_config_file={data}/sequences/bert.json -vocab_file={data}/sequences/vocab.txt "
        "-init_checkpoint= -max_seq_length=16 -batch_size={batch_size} -dropout_rate=1 "
        "-num_train_epochs={epochs} -learning_rate=0.001",
        licence="MIT",
        options="--v1",
        prepare=DATA,
        in_cluster=True,
        noise="/key/bias:",
        prepared=("*.tf_record", "*.pkl"),
    ),
    Program(
        "with_xlnet",
        "xlnet-tensorflow==1.1.2",
        "with_xlnet.py --data_dir={data}/sequences --model_dir={model_dir} "
        "--output_dir={data}/records --model_config_path={data}/sequences/xlnet.json "
        "--spiece_model_file={data}/sequences/pieces.model --train_steps={steps} "
        "--train_batch_size={batch_size}",
        options="--v1",
        prepare=DATA,
        in_cluster=True,
    ),
    Program(
        "opennmt",
        "OpenNMT-tf==1.25.3",
        "-m opennmt.bin.main train_and_eval --model={here}/opennmt_model.py --data_dir="
        "{data}/sequences --run_dir={directory} "
        "--config={data}/sequences/translation-{batch_size}.yml",
        licence="MIT",
        options="--v1",
        prepare=DATA,
    ),
    driver(
        "electra_ways",
        "own, as ELECTRA",
        options="--v1",
        is_global=True,
        in_cluster=True,
    ),
    Program(
        "tensor2tensor",
        "tensor2tensor==1.15.7",
        "-m tensor2tensor.bin.t2t_trainer --model=transformer --hparams_set=transformer_tiny "
        f"{T2T} --hparams=batch_size=128,num_hidden_layers=1,hidden_size=16,filter_size=16,"
        "num_heads=2,layer_prepostprocess_dropout=0.0,attention_dropout=0.0,relu_dropout=0.0 "
        "--train_steps={steps} --output_dir={model_dir} --schedule=train --random_seed=1",
        prepare=(
            f"-m estimator_ext -m tensor2tensor.bin.t2t_datagen {T2T} --tmp_dir={{data}}/tmp",
        ),
        not_compared="its batches are of sentences of like length, by their number of tokens",
    ),
    driver("with_spleeter", "spleeter==2.1.0", licence="MIT", batch_size=8),
)
