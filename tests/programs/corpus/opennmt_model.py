"""A small model for OpenNMT-tf."""

import opennmt


def model():
    source, target = (
        opennmt.inputters.WordEmbedder(f"{side}_words_vocabulary", embedding_size=16)
        for side in ("source", "target")
    )
    return opennmt.models.Transformer(source, target, 1, 16, 2, 32, 0.0, 0.0, 0.0)
