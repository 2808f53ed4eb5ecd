"""Files that hold weights: reading, checking, identifying."""

from lab.artifacts.checkpoint import Checkpoint
from lab.artifacts.inspection import corpus_facts, inspect, load_tokenizer

__all__ = ["Checkpoint", "corpus_facts", "inspect", "load_tokenizer"]
