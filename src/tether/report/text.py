"""Text from models and files, made safe to look at; markup is the page's or terminal's affair."""

import unicodedata

BIDI = set("\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""Characters that change the order in which others are shown."""


def visible(text: str) -> str:
    """Spell out control characters, lone surrogates and bidirectional overrides.

    Line ends and tabs stay; an escape sequence becomes readable text and moves no cursor.
    """
    return "".join(_shown(character) for character in text)


def _shown(character: str) -> str:
    if character in "\n\t":
        return character
    if character in BIDI or unicodedata.category(character) in {"Cc", "Cs"}:
        code = ord(character)
        return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"
    return character
