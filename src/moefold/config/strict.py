"""How the tree is validated: an unknown key is an error, never ignored."""

from __future__ import annotations

from typing import Any

STRICT: dict[str, Any] = {"extra": "forbid"}
