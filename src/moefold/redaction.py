"""Remove secrets from text and data that leave the machine, and logins from whatever is written down.

`without_login` is for all that a run writes and prints: configurations, metrics, manifests, error messages. It removes
the login of an address and what follows its question mark, where object stores put signatures. `Redactor` is for what
is sent to others.

It has three rules, all applied to every string: the value of any variable whose name sounds like a secret is removed
wherever it occurs; so is text of the form of a known kind of key, of a login in an address, of an address's query, and
of an assignment to a name that sounds like a secret; and the home directory becomes `~`. Of the environment only
variables of an allow-list are kept at all.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

REDACTED = "[redacted]"
_SECRET_NAME = re.compile(
    r"token(?!iz)|secret|passw|passphrase|api_?key|access_?key|private_?key|credential|cookie|session|auth|signature|_key$|_pat$",
    re.IGNORECASE,
)
# Shorter values occur by chance.
_SHORTEST_VALUE = 6
# A login in an address, and what follows its question mark.
_ADDRESS: tuple[tuple[re.Pattern[str], str], ...] = (
    (re.compile(r"(?<=://)[^/\s]*@"), f"{REDACTED}@"),
    # A password with a slash in it; host:port/ is none.
    (re.compile(r"(?<=://)(?![^/\s:@]*:\d+/)[^/\s:@]+:[^\s\"'@]*@"), f"{REDACTED}@"),
    (re.compile(r"(://[^\s?\"']*)\?[^\s\"']+"), rf"\1?{REDACTED}"),
)
_PATTERNS: tuple[tuple[re.Pattern[str], str | Callable[[re.Match[str]], str]], ...] = (
    *_ADDRESS,
    # Keys of Hugging Face, OpenAI, GitHub, GitLab, AWS, Google, Slack; JSON web tokens; private keys.
    (re.compile(r"\bhf_[A-Za-z0-9]{16,}"), REDACTED),
    (re.compile(r"\bsk-[A-Za-z0-9_-]{16,}"), REDACTED),
    (re.compile(r"\b(gh[pousr]_|github_pat_|glpat-)[A-Za-z0-9_-]{16,}"), REDACTED),
    (re.compile(r"\b(AKIA|ASIA)[0-9A-Z]{16}\b"), REDACTED),
    (re.compile(r"\bAIza[0-9A-Za-z_-]{30,}"), REDACTED),
    (re.compile(r"\bxox[abprs]-[A-Za-z0-9-]{10,}"), REDACTED),
    (re.compile(r"\beyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+"), REDACTED),
    (re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL), REDACTED),
    # A key of Weights & Biases. Digests of moefold have 64 digits.
    (re.compile(r"\b[0-9a-f]{40}\b"), REDACTED),
    (
        re.compile(
            r"((?:token|secret|passw\w*|api[_-]?key|access[_-]?key|credential\w*|authorization)[\"']?\s*[=:]\s*)"
            r"(?:bearer\s+)?[^\s,;&\"'}]+|(?<=bearer )\S+",
            re.IGNORECASE,
        ),
        lambda found: f"{found[1] or ''}{REDACTED}",
    ),
)

# Variables that say how a job was started and how its libraries were set up.
_KEPT_NAMES = {
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_PORT", "OMP_NUM_THREADS"),
    *("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_STEP_NUM_TASKS", "SLURM_NNODES", "SLURM_GPUS_PER_NODE"),
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK", "PMI_SIZE", "CUDA_HOME"),
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_MAX_CONNECTIONS", "CUDA_LAUNCH_BLOCKING", "PYTORCH_CUDA_ALLOC_CONF"),
    *("PYTORCH_ALLOC_CONF", "MKL_NUM_THREADS", "LD_PRELOAD"),
}
_KEPT_PREFIXES = ("NCCL_", "TORCH_NCCL_", "TORCH_FR_", "GLOO_", "UCX_", "FI_", "TRITON_")


def without_login(text: str) -> str:
    """The same text, without logins and queries of the addresses in it."""
    if "://" not in text:
        return text
    for pattern, by in _ADDRESS:
        text = pattern.sub(by, text)
    return text


class Redactor:
    """Knows the secrets of one environment."""

    def __init__(self, environment: Mapping[str, str], home: str = "") -> None:
        values = {
            value.strip()
            for name, value in environment.items()
            if _SECRET_NAME.search(name) and len(value.strip()) >= _SHORTEST_VALUE
        }
        # The longest first: one may be a part of another.
        self._values = sorted(values, key=len, reverse=True)
        self._home = home.rstrip("/")

    def text(self, text: str) -> str:
        for value in self._values:
            text = text.replace(value, REDACTED)
        for pattern, by in _PATTERNS:
            text = pattern.sub(by, text)
        # A home of one component, such as /root, is a part of other paths.
        return re.sub(rf"(?<!\w){re.escape(self._home)}(?!\w)", "~", text) if self._home else text

    def data(self, value: object) -> object:
        """JSON data with every string redacted; a field whose name sounds like a secret is redacted whole."""
        if isinstance(value, str):
            return self.text(value)
        if isinstance(value, Mapping):
            return {
                self.text(str(key)): REDACTED if _is_secret(str(key), inner) else self.data(inner)
                for key, inner in value.items()
            }
        if isinstance(value, list | tuple):
            return [self.data(inner) for inner in value]
        return value

    def environment(self, environment: Mapping[str, str]) -> dict[str, str]:
        """Variables of the allow-list; one of them whose name sounds like a secret is left out."""
        return {
            name: self.text(value)
            for name, value in sorted(environment.items())
            if (name in _KEPT_NAMES or name.startswith(_KEPT_PREFIXES)) and not _SECRET_NAME.search(name)
        }


def _is_secret(name: str, value: object) -> bool:
    """Only text can be a secret: `tokens` and `tokens_per_s` are numbers."""
    return isinstance(value, str) and bool(_SECRET_NAME.search(name))
