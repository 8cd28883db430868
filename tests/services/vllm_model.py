"""Makes a small random Llama with a tokenizer of its own, for an engine that only must be real.

    PYTHON tests/services/vllm_model.py FOLDER [tiny|small]

PYTHON is that of vLLM's environment, which has torch and transformers. Same seed, same standard
library: same model. What it says has no meaning; how long it takes is that of a trained one.
"""

import sys
import sysconfig
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

VOCABULARY = 4_096
SIZES = {
    "tiny": {  # 1.7 M parameters, mostly overhead: its streams last as long as a test needs them
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    },
    "small": {  # 108 M, the layers of SmolLM2-135M: slow enough to be saturated by a few callers
        "hidden_size": 576,
        "intermediate_size": 1_536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "head_dim": 64,
    },
}
_CHAT = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def byte_bpe(out: str) -> PreTrainedTokenizerFast:
    """Train a byte-level tokenizer on the standard library and write it to a folder."""
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<bos>", "<eos>", "<pad>"],
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    texts = sorted(map(str, Path(sysconfig.get_path("stdlib")).glob("*.py")))
    tok.train(texts, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tok, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>"
    )
    fast.chat_template = _CHAT
    fast.save_pretrained(out)
    return fast


def main(out: str, size: str = "tiny") -> None:
    """Write the model and its tokenizer to a folder."""
    vocabulary = len(byte_bpe(out))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        **SIZES[size],
        tie_word_embeddings=True,
        max_position_embeddings=32_768,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(out)


if __name__ == "__main__":
    main(*sys.argv[1:])
