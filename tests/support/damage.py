"""What a hand or a disk does to a file."""

import json


def change_json(path, **changes):
    """Give fields of a JSON object other values."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def flip_bit(path, place=-5):
    """Flip a bit of a file, in a file of its own: what it was linked to stays as it is."""
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.unlink()
    path.write_bytes(content)


def cut(path):
    """Leave half of a file, also in a file of its own."""
    content = path.read_bytes()
    path.unlink()
    path.write_bytes(content[: len(content) // 2])
