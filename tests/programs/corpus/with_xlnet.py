"""The main of xlnet.run_classifier, which on PyPI reads flags that it does not define."""

import tensorflow as tf
from absl import flags
from xlnet import run_classifier

for _name in ("data_dir", "model_config_path", "model_dir", "output_dir", "spiece_model_file"):
    flags.DEFINE_string(_name, "", "")
for _name in ("train_batch_size", "train_steps"):
    flags.DEFINE_integer(_name, None, "")
_DEFAULTS = {
    "string": {
        "cls_scope": "",
        "decay_method": "poly",
        "eval_split": "dev",
        "init": "normal",
        "init_checkpoint": None,
        "master": None,
        "predict_ckpt": None,
        "predict_dir": None,
        "summary_type": "last",
        "task_name": "yelp5",
    },
    "float": {
        "adam_epsilon": 1e-4,
        "clip": 1.0,
        "dropatt": 0.0,
        "dropout": 0.0,
        "init_range": 0.1,
        "init_std": 0.1,
        "learning_rate": 1e-3,
        "lr_layer_decay_rate": 0.75,
        "min_lr_ratio": 0.0,
        "weight_decay": 0.01,
    },
    "integer": {
        "clamp_len": -1,
        "eval_batch_size": 8,
        "iterations": 1000,
        "max_save": 0,
        "max_seq_length": 16,
        "mem_len": 0,
        "num_core_per_host": 1,
        "num_hosts": 1,
        "num_passes": 1,
        "predict_batch_size": 8,
        "reuse_len": 0,
        "save_steps": 10,
        "shuffle_buffer": 1,
        "warmup_steps": 4,
    },
    "boolean": dict.fromkeys(("do_train", "do_eval", "use_summ_proj"), True),
}
_NOT_SET = "bi_data do_predict eval_all_ckpt is_regression overwrite_data same_length uncased"
_DEFAULTS["boolean"].update(dict.fromkeys((*_NOT_SET.split(), "use_bfloat16", "use_tpu"), False))
for _kind, _values in _DEFAULTS.items():
    for _name, _value in _values.items():
        getattr(flags, f"DEFINE_{_kind}")(_name, _value, "")

if __name__ == "__main__":
    tf.app.run(run_classifier.main)
