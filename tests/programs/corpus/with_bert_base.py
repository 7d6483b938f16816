"""The command bert-base-ner-train."""

from bert_base.runs import train_ner

train_ner()
