"""Writes a GGUF file with every tensor decoded to float32: the same weights without block types, `python -m experiments.gguf_as_f32 SRC DST`.

Why: llama.cpp quantises activations to 8 bits before it multiplies a quantised tensor, and does not for float32 ones. Run through both files, it shows how much
of a difference between two engines is that, and how much is anything else. The `gguf` package decodes and writes; nothing of the lab is used.
"""

from __future__ import annotations

import sys
from pathlib import Path

import gguf
import numpy as np


def main(words: list[str]) -> int:
    """Converts. Returns 2, with one line, for wrong arguments."""
    if len(words) != 2 or not Path(words[0]).is_file():
        print("error: usage: python -m experiments.gguf_as_f32 SRC.gguf DST.gguf, SRC being a file", file=sys.stderr)
        return 2
    source, target = Path(words[0]), Path(words[1])
    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    partial = target.with_suffix(".part")
    writer = gguf.GGUFWriter(partial, str(architecture))
    for name, field in reader.fields.items():
        if name.startswith("GGUF.") or name in ("general.architecture", "general.file_type"):
            continue
        writer.add_key_value(name, field.contents(), field.types[0], field.types[-1] if len(field.types) > 1 else None)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, np.ascontiguousarray(gguf.dequantize(tensor.data, tensor.tensor_type), dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.replace(target)
    print(f"{target.name}: {target.stat().st_size} bytes, {len(reader.tensors)} tensors in float32")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
