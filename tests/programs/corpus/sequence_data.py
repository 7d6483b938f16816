"""Writes tagged sentences, and what the programs of the sequence models read, to a folder."""

import json
import pathlib
import random
import sys

import sentencepiece

NAMES = {"ann": "B-PER", "bob": "B-PER", "paris": "B-LOC", "rome": "B-LOC", "acme": "B-ORG"}
WORDS = [*NAMES, "went", "to", "the", "in", "with"]
BERT = {
    "attention_probs_dropout_prob": 0.0,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.0,
    "hidden_size": 16,
    "initializer_range": 0.1,
    "intermediate_size": 32,
    "max_position_embeddings": 32,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "type_vocab_size": 2,
    "vocab_size": 15,
}
XLNET = {
    "d_head": 8,
    "d_inner": 32,
    "d_model": 16,
    "ff_activation": "gelu",
    "n_head": 2,
    "n_layer": 2,
    "n_token": 32000,
    "untie_r": True,
}

TRANSLATION = """
model_dir: model
data:
  source_words_vocabulary: translation.txt
  target_words_vocabulary: translation.txt
  train_features_file: train.text
  train_labels_file: train.text
  eval_features_file: dev.text
  eval_labels_file: dev.text
params:
  optimizer: AdamOptimizer
  optimizer_params: {{epsilon: 0.001}}  # gradients of the biases of keys are rounding errors
  learning_rate: 0.01
  clip_gradients: 1.0
train:
  batch_size: {}
  bucket_width: null
  sample_buffer_size: null
  save_checkpoints_steps: 10
  train_steps: 20
"""

folder = pathlib.Path(sys.argv[1])
folder.mkdir(parents=True, exist_ok=True)
random.seed(1)
for name, count in (("train", 640), ("dev", 32), ("test", 16)):
    sentences = [random.choices(WORDS, k=random.randint(3, 8)) for _ in range(count)]
    tagged = ["".join(f"{word} {NAMES.get(word, 'O')}\n" for word in each) for each in sentences]
    (folder / f"{name}.txt").write_text("\n".join([*tagged, ""]))
    rows = "".join(f'"{1 + len(each) % 5}","{" ".join(each)}"\n' for each in sentences)
    (folder / f"{name}.csv").write_text(rows)  # as in Yelp: stars and a review
    (folder / f"{name}.text").write_text("".join(f"{' '.join(each)}\n" for each in sentences))
(folder / "words.txt").write_text("\n".join(WORDS))
(folder / "tags.txt").write_text("\n".join(["O", *sorted({*NAMES.values()})]))
(folder / "vocab.txt").write_text(
    "\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS])
)
(folder / "translation.txt").write_text("\n".join(["<blank>", "<s>", "</s>", *WORDS]))
for batch_size in (16, 32):
    (folder / f"translation-{batch_size}.yml").write_text(TRANSLATION.format(batch_size))
(folder / "bert.json").write_text(json.dumps(BERT))
(folder / "xlnet.json").write_text(json.dumps(XLNET))
sentencepiece.SentencePieceTrainer.train(
    input=str(folder / "train.text"),
    model_prefix=str(folder / "pieces"),
    vocab_size=40,
    hard_vocab_limit=False,
    control_symbols="<cls>,<sep>,<pad>,<mask>,<eod>,<eop>",
)
