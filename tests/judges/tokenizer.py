"""Write a small tokenizer into a folder: byte-level BPE, trained on the standard library's sources.

Run by a judge's own Python: `tokenizer.py FOLDER [SIZE]`. Nothing is downloaded.
"""

import sys
import sysconfig
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast  # type: ignore[import-not-found,unused-ignore]

_SPECIAL = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
_CHAT = (
    "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def write(folder: Path, size: int) -> None:
    """Train `size` tokens and write what `AutoTokenizer.from_pretrained` reads."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=list(_SPECIAL.values()),
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    sources = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    bpe.train([str(path) for path in sources], trainer)
    fast = PreTrainedTokenizerFast(tokenizer_object=bpe, **_SPECIAL)
    fast.chat_template = _CHAT
    fast.save_pretrained(folder)


if __name__ == "__main__":
    write(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 8_192)
