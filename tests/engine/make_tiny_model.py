#!/usr/bin/env python3
"""Make a tiny Llama of random weights with its own tokenizer and chat template; nothing is downloaded.

usage: make_tiny_model.py OUTDIR [--context TOKENS] [--seed N]

Runs in the engine's own environment (torch, transformers, tokenizers). The same seed gives the
same weights.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = os.environ["TRANSFORMERS_OFFLINE"] = "1"

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

SPECIAL = ("<unk>", "<s>", "</s>", "<pad>", "<|turn|>", "<|end|>")
# Roles are plain text after <|turn|>; what is generated follows the last, open turn.
CHAT_TEMPLATE = (
    "{% for message in messages %}<|turn|>{{ message['role'] }}\n{{ message['content'] }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|turn|>assistant\n{% endif %}"
)
# 6 special tokens, 256 bytes, and made-up words. No merge leads to a word, so a prompt has a token a byte; but random
# weights choose words most of the time, so that what is generated is text and not halves of UTF-8 sequences.
VOCABULARY = 1024
WIDTH, LAYERS, HEADS, KV_HEADS = 64, 2, 2, 1


def tokenizer(context: int) -> PreTrainedTokenizerFast:
    """Byte by byte: every text can be encoded, and a prompt's length in tokens is its length in bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    syllables = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]
    words = (f"Ġ{first}{second}" for first in syllables for second in syllables)  # Ġ is ByteLevel's space
    tokens = (*SPECIAL, *alphabet, *words)[:VOCABULARY]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    raw = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(list(SPECIAL))
    return PreTrainedTokenizerFast(
        tokenizer_object=raw,
        unk_token="<unk>",
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("outdir", type=Path)
    parser.add_argument("--context", type=int, default=4096, help="tokens the model may be given (default %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    options.outdir.mkdir(parents=True, exist_ok=True)
    words = tokenizer(options.context)
    words.save_pretrained(options.outdir)

    torch.manual_seed(options.seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=WIDTH // HEADS,
        max_position_embeddings=options.context,
        tie_word_embeddings=False,
        bos_token_id=words.bos_token_id,
        eos_token_id=words.eos_token_id,
        pad_token_id=words.pad_token_id,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.save_pretrained(options.outdir)
    print(f"{options.outdir}: {sum(p.numel() for p in model.parameters())} parameters, vocabulary {VOCABULARY}")


if __name__ == "__main__":
    main()
