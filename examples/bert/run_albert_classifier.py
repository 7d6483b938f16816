"""Starts run_classifier of albert-tensorflow, and defines the flags that it reads but lacks."""

from absl import app, flags
from albert import run_classifier

flags.DEFINE_string("albert_config_file", None, "Configuration of the model, in JSON.")
flags.DEFINE_string("task_name", None, "Task: cola, mnli, mrpc or xnli.")
flags.DEFINE_string("data_dir", None, "Directory of the task's data.")
flags.DEFINE_string("output_dir", None, "Directory of checkpoints and results.")
flags.DEFINE_string("vocab_file", None, "Vocabulary, one word per line.")
flags.DEFINE_string("spm_model_file", None, "SentencePiece model; None splits into words.")
flags.DEFINE_string("init_checkpoint", None, "Checkpoint of a pretrained model.")
flags.DEFINE_bool("do_lower_case", True, "Convert text to lower case.")
flags.DEFINE_bool("do_train", False, "Train.")
flags.DEFINE_bool("do_eval", False, "Evaluate.")
flags.DEFINE_bool("do_predict", False, "Predict.")
flags.DEFINE_bool("use_pooled_output", True, "Classify the pooled output.")
flags.DEFINE_integer("max_seq_length", 128, "Longest sequence, in tokens.")
flags.DEFINE_integer("train_batch_size", 32, "Examples per step, over all ranks.")
flags.DEFINE_integer("eval_batch_size", 8, "Examples per batch in evaluation.")
flags.DEFINE_integer("predict_batch_size", 8, "Examples per batch in prediction.")
flags.DEFINE_integer("save_checkpoints_steps", 1000, "Steps between checkpoints.")
flags.DEFINE_integer("iterations_per_loop", 1000, "Steps per loop of a TPU.")
flags.DEFINE_float("learning_rate", 5e-5, "Learning rate of AdamW.")
flags.DEFINE_float("num_train_epochs", 3.0, "Number of epochs.")
flags.DEFINE_float("warmup_proportion", 0.1, "Fraction of training with a rising learning rate.")
flags.DEFINE_bool("use_tpu", False, "Use a TPU.")
flags.DEFINE_string("master", None, "Address of a TPU.")
flags.DEFINE_string("tpu_name", None, "Name of a TPU.")
flags.DEFINE_string("tpu_zone", None, "Zone of a TPU.")
flags.DEFINE_string("gcp_project", None, "Project of a TPU.")
flags.DEFINE_integer("num_tpu_cores", 8, "Number of cores of a TPU.")

if __name__ == "__main__":
    app.run(run_classifier.main)
