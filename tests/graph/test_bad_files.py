"""Every invalid graph file gives one line: file, line, key, the mistake, and the remedy."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from graph.model_facts import FACTS
from hypothesis import given, settings
from hypothesis import strategies as st

from flowrt.document import parse_document
from flowrt.errors import GraphError, UserError
from flowrt.graph.file import build_graph, load_graph

MODEL = "flowrt: 1\nmodel: {path: m}\n"
USER = """flowrt: 1
nodes:
  a: {operator: ops:a, process: left}
  b: {operator: ops:b, process: right}
edges:
  input.x -> a.x:
  a.y -> b.x:
  b.y -> output.y:
"""


def deploy(attention: str = "", experts: str = "", rest: str = "") -> str:
    """Lines 3 to 5 are deploy, attention, experts."""
    return MODEL + f"deploy:\n  attention: {{{attention}}}\n  experts: {{{experts}}}\n{rest}"


def between(sent: str, received: str) -> str:
    """Two nodes with the tensors that one sends to the other."""
    left = USER.replace("process: left", f"process: left, outputs: {{y: '{sent}'}}")
    return left.replace("process: right", f"process: right, inputs: {{x: '{received}'}}")


# text, line, path, parts of the message
BAD = {
    "empty": ("", 1, "", ["is empty", "flowrt: 1"]),
    "a list": ("- a\n", 1, "", ["not a mapping"]),
    "not YAML": ("flowrt: 1\nmodel: [\n", 3, "", ["is not YAML"]),
    "tabs": ("flowrt: 1\nmodel:\n\tpath: m\n", 3, "", ["is not YAML", "\\t"]),
    "control character": ("flowrt: 1\nmodel: \x07\n", 2, "", ["character"]),
    "two documents": (MODEL + "---\nflowrt: 1\n", 3, "", ["second document"]),
    "no version": ("model: {path: m}\n", 1, "flowrt", ["is missing", "flowrt: 1"]),
    "other version": ("flowrt: 2\nmodel: {path: m}\n", 1, "flowrt", ["2 is not possible", "write 1"]),
    "version is true": ("flowrt: true\nmodel: {path: m}\n", 1, "flowrt", ["true is not possible"]),
    "no model": ("flowrt: 1\n", 1, "", ["model is missing", "nodes"]),
    "no model path": ("flowrt: 1\nmodel: {dtype: float32}\n", 2, "model.path", ["is missing"]),
    "model not there": ("flowrt: 1\nmodel: {path: nowhere}\n", 2, "model.path", ["no folder 'nowhere'", "give the path"]),
    "dtype": ("flowrt: 1\nmodel: {path: m, dtype: int4}\n", 2, "model.dtype", ["'int4' is not possible", "float32"]),
    "duplicate": (MODEL + "model: {path: m}\n", 3, "model", ["twice", "line 2", "keep one"]),
    "duplicate deep": (MODEL + "deploy:\n  experts:\n    servers: 1\n    servers: 2\n", 6, "deploy.experts.servers", ["twice", "line 5"]),
    "tag": ("flowrt: 1\nmodel: !!python/object:os.system {path: m}\n", 2, "model", ["tag", "refused"]),
    "plain tag": ("flowrt: !!int 1\nmodel: {path: m}\n", 1, "flowrt", ["tag"]),
    "anchor": ("flowrt: 1\nmodel: &m {path: m}\n", 2, "model", ["&m", "anchor"]),
    "alias": ("flowrt: 1\nmodel: *m\n", 2, "model", ["*m", "anchor"]),
    "deep": ("flowrt: " + "[" * 60 + "]" * 60 + "\n", 1, "flowrt.0.0.0", ["deep"]),
    "key is a list": ("flowrt: 1\n? [a]\n: 1\n", 2, "", ["a key must be a word"]),
    "huge number": ("flowrt: " + "9" * 40 + "\n", 1, "flowrt", ["too large"]),
    "unknown key": (MODEL + "modle: 3\n", 3, "modle", ["unknown key 'modle'", "did you mean 'model'?"]),
    "unknown deep key": (deploy("grups: 2"), 4, "deploy.attention.grups", ["did you mean 'groups'?"]),
    "key elsewhere": (MODEL + "servers: 2\n", 3, "servers", ["belongs under deploy.experts"]),
    "key elsewhere, like a known one": (MODEL + "groups: 2\n", 3, "groups", ["belongs under deploy.attention"]),
    "unknown far key": (deploy("zzz: 2"), 4, "deploy.attention.zzz", ["known: ", "micro_batches"]),
    "wrong type": (deploy("groups: two"), 4, "deploy.attention.groups", ["'two' is not a whole number"]),
    "float for int": (deploy("groups: 2.0"), 4, "deploy.attention.groups", ["2.0 is not a whole number"]),
    "bool for int": (deploy("groups: true"), 4, "deploy.attention.groups", ["true is not a whole number"]),
    "nothing for int": (deploy("groups: "), 4, "deploy.attention.groups", ["nothing is not a whole number"]),
    "too small": (deploy("groups: 0"), 4, "deploy.attention.groups", ["0 is too small", "1 or more"]),
    "negative": (deploy("", "servers: -1"), 5, "deploy.experts.servers", ["-1 is not possible", "a number from 0 to 1024"]),
    "section is a list": (MODEL + "deploy: []\n", 3, "deploy", ["a list is not a mapping"]),
    "path in place of a section": ("flowrt: 1\nmodel: my-model\n", 2, "model", ["lines below it, such as path: my-model"]),
    "section is text": (MODEL + "deploy:\n  attention: many\n", 4, "deploy.attention", ["'many' is not a mapping"]),
    "processes": (deploy(rest="  processes: few\n"), 6, "deploy.processes", ["'few'", "one, many"]),
    "processes zero": (deploy(rest="  processes: 0\n"), 6, "deploy.processes", ["one, many"]),
    "processes at the top": (MODEL + "processes: one\n", 3, "processes", ["deploy.processes"]),
    "micro_batches at the top": (MODEL + "micro_batches: 2\n", 3, "micro_batches", ["deploy.attention.micro_batches"]),
    "threads": (deploy("threads: all"), 4, "deploy.attention.threads", ["'all'", "auto"]),
    "cores": (deploy("cores: all"), 4, "deploy.attention.cores", ["'all' is not an id or range"]),
    "no cores": (deploy("cores: ''"), 4, "deploy.attention.cores", ["names no core"]),
    "cores of packed processes": (deploy("cores: 0", rest="  processes: one\n"),
        4, "deploy.attention.cores", ["only a process of its own has cores of its own", "processes: many"]),
    "cores at the top": (MODEL + "cores: {attention.0: 1}\n", 3, "cores", ["deploy.attention.cores"]),
    "garbage collection": (MODEL + "jitter: {garbage_collection: never}\n", 3, "jitter.garbage_collection", ["automatic or idle"]),
    "long prompts": (MODEL + "deploy: {prefill: {workers: 2}, attention: {groups: 3}}\nlong_prompts: {min_tokens: 9, workers: 2}\n",
        4, "long_prompts.workers", ["2 of 2 workers are for long prompts; write fewer"]),
    "long prompts of no length": (MODEL + "long_prompts: {workers: 2}\n", 3, "long_prompts.min_tokens", ["is missing"]),
    "target of a step": (MODEL + "limits: {target_step_seconds: -1}\n", 3, "limits.target_step_seconds", ["-1 is too small"]),
    "device": (deploy("", "device: gpu"), 5, "deploy.experts.device", ["'gpu' is not a device", "cuda"]),
    "transport": (deploy(rest="  links: {attention-experts: {transport: shmm}}\n"), 6, "deploy.links.attention-experts.transport", []),
    "open": (deploy(rest="  links: {attention-experts: {open: later}}\n"), 6, "deploy.links.attention-experts.open", ["later", "start"]),
    "link": (deploy("", "servers: 1", "  links: {attention-experts: {link: ubb}}\n"),
        6, "deploy.links.attention-experts.link", ["unknown link 'ubb'", "did you mean 'ub'"]),
    "link number": (deploy("", "servers: 1", "  links: {attention-experts: {link: {speed: 3}}}\n"),
        6, "deploy.links.attention-experts.link", ["unknown number 'speed'"]),
    "unknown transport": (deploy("", "servers: 1", "  links: {attention-experts: {transport: shmm}}\n"),
        6, "deploy.links.attention-experts.transport", ["no transport 'shmm'", "did you mean 'shm'?"]),
    "transport between prefill workers and experts": (
        deploy("", "servers: 1", "  prefill: {workers: 1}\n  links: {attention-experts: {transport: shmm}}\n"),
        7,
        "deploy.links.attention-experts.transport",
        ["no transport 'shmm'"],
    ),
    "transport of transfers": (deploy("", "servers: 1", "  prefill: {workers: 1}\n  links: {prefill-attention: {transport: shmm}}\n"),
        7, "deploy.links.prefill-attention.transport", ["no transport 'shmm'"]),
    "inproc between processes": (deploy("", "servers: 1", "  links: {attention-experts: {transport: inproc}}\n"),
        6, "deploy.links.attention-experts.transport", ["inproc stays inside one process", "processes: one"]),
    "few credits": (deploy("micro_batches: 2", "servers: 1", "  links: {attention-experts: {credits: 1}}\n"),
        6, "deploy.links.attention-experts.credits", ["1 is too few", "2 micro-batches keep 2 messages", "at least 2"]),
    "replicas": (deploy("", "servers: 2, replicas: 3"), 5, "deploy.experts.replicas", ["3 replicas", "there are 2", "servers: 3"]),
    "replicas without servers": (deploy("", "replicas: 2"), 5, "deploy.experts.replicas", ["replicas: 1", "servers: 2"]),
    "too many servers": (deploy("", "servers: 9"), 5, "deploy.experts.servers", ["9 servers", "8 experts", "at most 8"]),
    "micro-batches": (deploy("micro_batches: 4", rest="limits: {max_num_seqs: 2}\n"),
        4, "deploy.attention.micro_batches", ["4 micro-batches", "at most 2"]),
    "no replica": (deploy("", "servers: 2, placement: {experts.0: '0-3', experts.1: '5-7'}"),
        5, "deploy.experts.placement", ["expert 4 has no replica"]),
    "no replica in a layer": (deploy("", "servers: 1, placement: {experts.0: {0-2: 0-7, 3: 1-7}}"),
        5, "deploy.experts.placement", ["expert 0 has no replica in layer 3"]),
    "too few replicas": (deploy("", "servers: 2, replicas: 2, placement: {experts.0: '0-7', experts.1: '1-7'}"),
        5, "deploy.experts.placement", ["expert 0 has 1 replicas", "expected 2"]),
    "unknown server": (deploy("", "servers: 2, placement: {experts.0: '0-7', experts.5: '0'}"),
        5, "deploy.experts.placement.experts.5", ["no server 'experts.5'", "experts.1"]),
    "server left out": (deploy("", "servers: 2, placement: {experts.0: '0-7'}"), 5, "deploy.experts.placement", ["experts.1 is left out"]),
    "expert too large": (deploy("", "servers: 1, placement: {experts.0: '0-8'}"),
        5, "deploy.experts.placement.experts.0", ["expert 8", "experts 0 to 7"]),
    "expert twice": (deploy("", "servers: 1, placement: {experts.0: '0-7,3'}"),
        5, "deploy.experts.placement.experts.0", ["3 is given twice"]),
    "backwards": (deploy("", "servers: 1, placement: {experts.0: '7-0'}"), 5, "deploy.experts.placement.experts.0", ["backwards", "0-7"]),
    "placement for an unknown server": (deploy("", "placement: {experts.0: '0-7'}"),
        5, "deploy.experts.placement", ["servers: 0 leaves nothing to place"]),
    "layer without experts": (deploy("", "servers: 1, placement: {experts.0: {0-9: 0-7}}"),
        5, "deploy.experts.placement.experts.0", ["layer 4 has no experts"]),
    "domains": (deploy("domains: 2"), 4, "deploy.attention.domains", ["2 domains need as many groups", "at most 1"]),
    "tensor_parallel": (deploy("tensor_parallel: 2"), 4, "deploy.attention.tensor_parallel", ["not built yet"]),
    "servers": (deploy("", "servers: inside"), 5, "deploy.experts.servers", ["write colocated, or a number from 0 to 1024"]),
    "colocated and trampolines": (deploy("groups: 2", "servers: colocated, trampoline: always"),
        5, "deploy.experts.trampoline", ["colocated servers do not forward", "write trampoline: never"]),
    "colocated on another device": (deploy("groups: 2", "servers: colocated, device: cuda"),
        5, "deploy.experts.device", ["in the processes of groups", "write deploy.attention.device"]),
    "numerics": (MODEL + "numerics: exact\n", 3, "numerics", ["fast or strict"]),
    "strict chunks": (MODEL + "numerics: strict\nlimits: {max_num_batched_tokens: 40}\n",
        4, "limits.chunk_tokens", ["a chunk of 64 tokens exceeds limits.max_num_batched_tokens 40", "write 40 or less"]),
    "strict threads": (deploy("threads: 2", "servers: 1, threads: 1", "numerics: strict\n"),
        5, "deploy.experts.threads", ["the same number of threads everywhere, got 1 and 2"]),
    "strict page size": (MODEL + "deploy: {prefill: {workers: 1}}\nnumerics: strict\nlimits: {roles: {prefill: {page_size: 4}}}\n",
        5, "limits.roles.prefill.page_size", ["strict numerics need pages of one size, got 4 here and 16 for attention"]),
    "strict device of prefill workers": (deploy(rest="  prefill: {workers: 1, device: cuda}\nnumerics: strict\n"),
        6, "deploy.prefill.device", ["strict numerics need CPUs, process prefill.0 computes on cuda"]),
    "strict device": (deploy("device: cuda", rest="numerics: strict\n"),
        4, "deploy.attention.device", ["strict numerics need CPUs", "write cpu, or numerics: fast"]),
    "hosts": (MODEL + "hosts: [a, b]\n", 3, "hosts", ["is not a mapping"]),
    "prefill": (deploy(rest="  prefill: {groups: 1}\n"), 6, "deploy.prefill.groups", ["belongs under deploy.attention"]),
    "emulate nothing": (MODEL + "emulate: {dilation: 2}\n", 3, "emulate", ["there is nothing to emulate", "link: ub"]),
    "emulate without dilation": (MODEL + "emulate: {}\n", 3, "emulate.dilation", ["is missing"]),
    "dilation": (MODEL + "emulate: {dilation: 0.5}\n", 3, "emulate.dilation", ["0.5 is too small", "1 or more"]),
    "dilation word": (MODEL + "emulate: {dilation: much}\n", 3, "emulate.dilation", ["'much' is not a number"]),
    "modelled time": (MODEL + "emulate: {dilation: 2, compute: {experts: {row_seconds: -1}}}\n",
        3, "emulate.compute.experts.row_seconds", ["-1 is too small"]),
    "modelled time that is none": (MODEL + "emulate: {dilation: 2, compute: {gate: {}}}\n",
        3, "emulate.compute.gate", ["a row takes no time"]),
    "modelled time that is never charged": (MODEL + "emulate: {dilation: 2, compute: {gate: {row_seconds: 1, kv_token_seconds: 1}}}\n",
        3, "emulate.compute.gate.kv_token_seconds", ["only 'attention' is charged for this"]),
    "more tags than there are": (MODEL + "deploy: {experts: {servers: 1, batches: {min_tags: 3, max_wait_seconds: 1e-3}}}\n",
        3, "deploy.experts", ["would wait for 3 tags, and at most 1 can be in flight"]),
    "batches of servers": (MODEL + "deploy: {experts: {servers: 1, batches: true}}\n", 3, "deploy.experts.batches", ["true"]),
    "modelled time of nothing": (USER + "emulate: {dilation: 2, compute: {experts: {fixed_seconds: 1}}}\n",
        9, "emulate.compute.experts", ["no node of this graph has the operator 'experts'", "known: "]),
    "emulate in the wrong place": (deploy(rest="  links: {emulate: {dilation: 2}}\n"), 6, "deploy.links.emulate", ["top of the file"]),
    "numbers beside link": (deploy(rest="  links: {attention-experts: {latency_seconds: 1}}\n"),
        6, "deploy.links.attention-experts.latency_seconds", ["belong inside it: link: {latency_seconds: ..}"]),
    "a link that takes no time": (USER.replace("-> b.x:", "-> b.x: {link: {bandwidth_bytes_per_second: 1}}") + "emulate: {dilation: 2}\n",
        7, "edges.a.y -> b.x.link", ["takes no time for an empty message", "latency_seconds"]),
    "two links between two processes": (
        USER.replace("right}", "right}\n  c: {operator: ops:c, process: right}").replace("-> b.x:", "-> b.x: {link: ub}")
        + "  a.y -> c.x:\n  c.y -> output.z:\nemulate: {dilation: 2}\n",
        10,
        "edges.a.y -> c.x.link",
        ["a.y -> b.x has link ub, a.y -> c.x has no link", "write the same on both"],
    ),
    "unknown reliability key": (MODEL + "reliability: {recover: off}\n", 3, "reliability.recover", ["unknown key", "recovery"]),
    "recovery": (MODEL + "reliability: {recovery: 1}\n", 3, "reliability.recovery", ["1 is not possible", "write fine, "]),
    "a detector by a word": (MODEL + "reliability: {detector: always}\n", 3, "reliability.detector", ["neither true nor false"]),
    "negative restarts": (MODEL + "reliability: {restarts: -1}\n", 3, "reliability.restarts", ["-1 is too small", "0 or more"]),
    "half a restart": (MODEL + "reliability: {restarts: 1.5}\n", 3, "reliability.restarts", ["1.5 is not a whole number"]),
    "no window": (MODEL + "reliability:\n  restart_window_seconds: 0\n",
        4, "reliability.restart_window_seconds", ["0 is too small", "0.05 or more"]),
    "degraded without recovery": (MODEL + "reliability: {recovery: off, unavailable_expert: degrade}\n",
        3, "reliability.unavailable_expert", ["write recovery: fine"]),
    "unavailable expert": (MODEL + "reliability: {unavailable_expert: wait}\n", 3, "reliability.unavailable_expert", ["degrade"]),
    "infinite wait": (MODEL + "reliability: {unavailable_expert_seconds: .inf}\n",
        3, "reliability.unavailable_expert_seconds", ["not a number"]),
    "not even a number": (MODEL + "reliability: {suspect_seconds: .nan}\n", 3, "reliability.suspect_seconds", ["not a number"]),
    "dead before suspected": (MODEL + "reliability: {suspect_seconds: 1, dead_seconds: 0.5}\n",
        3, "reliability.dead_seconds", ["dead_seconds 0.5 is not longer than suspect_seconds 1"]),
    "suspected between two heartbeats": (MODEL + "reliability: {suspect_seconds: 0.05}\n",
        3, "reliability.suspect_seconds", ["two heartbeats of 0.1 s", "write at least 0.2"]),
    "log of no name": (MODEL + 'reliability: {request_log: "a\\0"}\n', 3, "reliability.request_log", [r"'a\x00' does not name a folder"]),
    "suspected after dead": (MODEL + "reliability: {suspect_seconds: 3}\n",
        3, "reliability.suspect_seconds", ["not longer", "raise dead_seconds"]),
    "reliable in the wrong place": (deploy(rest="  reliability: {restarts: 1}\n"), 6, "deploy.reliability", ["top of the file"]),
    "the monitor's name": (USER.replace("process: left", "process: monitor"), 3, "nodes.a.process", ["watches all others"]),
    "limits of an unknown role": (MODEL + "limits: {roles: {attentoin: {kv_pages: 3}}}\n",
        3, "limits.roles.attentoin", ["no process has the role", "did you mean 'attention'?"]),
    "a limit of a role": (MODEL + "limits: {roles: {attention: {chunk_tokens: 3}}}\n",
        3, "limits.roles.attention.chunk_tokens", ["unknown key"]),
    "messages of a role too small": (MODEL + "limits: {roles: {attention: {max_message_bytes: 2048}}}\n",
        3, "limits.max_message_bytes", ["write at least"]),
    "a link between unknown roles": (USER + "links: {left-rihgt: {transport: shm}}\n",
        9, "links.left-rihgt", ["no edge leads between these roles", "did you mean 'left-right'?"]),
    "links in the wrong place": (MODEL + "links: {}\n", 3, "links", ["deploy.links"]),
    "limits": (MODEL + "limits:\n  max_num_seqs: 0\n", 4, "limits.max_num_seqs", ["too small"]),
    "messages too small": (MODEL + "limits: {max_message_bytes: 2048}\n", 3, "limits.max_message_bytes", ["write at least"]),
    "prompts": (MODEL + "prompts: 3\n", 3, "prompts", ["not a file or a list"]),
    "prompt": (MODEL + "prompts: [a, 3]\n", 3, "prompts.1", ["3 is not a text"]),
    "prompts file": (MODEL + "prompts: no.jsonl\n", 3, "prompts", ["no file 'no.jsonl'"]),
    "both forms": (USER + "model: {path: m}\ndeploy: {}\n", 10, "deploy", ["either deploy: or nodes:"]),
    "edges alone": (MODEL + "edges: {}\n", 3, "edges", ["edges need nodes"]),
}  # fmt: skip

BAD_USER = {
    "no such node": (USER.replace("-> b.x", "-> bb.x"), 7, "edges.a.y -> bb.x", ["no node 'bb'", "did you mean 'b'?"]),
    "edge without port": (USER.replace("-> b.x", "-> b"), 7, "edges.a.y -> b", ["no node.port for to:", "node.port -> node.port"]),
    "edge without end": (USER.replace(" -> b.x:", ": {to: b.x}"), 7, "edges.a.y", ["no node.port for from:"]),
    "a bad end": (USER.replace("-> b.x:", "-> b.x: {to: b}"), 7, "edges.a.y -> b.x.to", ["'b' is not an end", "node.port"]),
    "a list of edges": (USER[: USER.index("edges:")] + "edges: [{from: input.x, to: a.x}]\n", 5, "edges", ["a list is not a mapping"]),
    "from output": (USER.replace("a.y ->", "output.y ->"), 7, "edges.output.y -> b.x", ["no edge leads from output"]),
    "to input": (USER.replace("-> b.x", "-> input.x"), 7, "edges.a.y -> input.x", ["no edge leads to input"]),
    "gateway": (USER.replace("process: left", "process: gateway"), 3, "nodes.a.process",
        ["'gateway' is the launching process", "; choose another name"]),
    "fork server": (USER.replace("process: left", "process: fork server"), 3, "nodes.a.process",
        ["'fork server' is the ", "; choose another name"]),
    "node called input": (USER.replace("  b:", "  input:"), 4, "nodes.input", ["is predefined"]),
    "name": (USER.replace("  b:", "  'b c':"), 4, "nodes.b c", ["'b c' is not a name"]),
    "operator": (USER.replace("ops:a", "gat"), 3, "nodes.a.operator", ["no operator 'gat'", "did you mean 'gate'?"]),
    "options": (USER.replace("process: left", "options: {k: 1}"), 3, "nodes.a.options", ["built-in operators"]),
    "unknown node key": (USER.replace("process: left", "proces: left"), 3, "nodes.a.proces", ["did you mean 'process'?"]),
    "unknown edge key": (USER.replace("-> b.x:", "-> b.x: {credit: 1}"), 7, "edges.a.y -> b.x.credit", ["did you mean 'credits'?"]),
    "credits zero": (USER.replace("-> b.x:", "-> b.x: {credits: 0}"), 7, "edges.a.y -> b.x.credits", ["too small"]),
    "spec": (USER.replace("process: left", "inputs: {x: 'float33[n]'}"), 3, "nodes.a.inputs.x", ["unknown dtype 'float33'"]),
    "spec shape": (USER.replace("process: left", "outputs: {y: 'float32'}"),
        3, "nodes.a.outputs.y", ["is not a tensor", "float32[rows,64]"]),
    "undeclared port": (USER.replace("process: left", "inputs: {z: 'int64[n]'}"), 6, "edges.input.x -> a.x", ["declares no input 'x'"]),
    "unfed port": (USER.replace("process: left", "inputs: {x: 'int64[n]', z: 'int64[n]'}"),
        3, "nodes.a.inputs.z", ["no edge leads to a.z", "connect it"]),
    "unused output": (USER.replace("process: left", "outputs: {y: 'int64[n]', z: 'int64[n]'}"),
        3, "nodes.a.outputs.z", ["no edge leads from a.z"]),
    "specs disagree": (between("float32[n,4]", "float32[n,5]"), 7, "edges.a.y -> b.x", ["expected dimension 5, got 4"]),
    "dtypes disagree": (between("float32[n]", "int64[n]"), 7, "edges.a.y -> b.x", ["expected int64, got float32"]),
    "ranks disagree": (between("float32[n]", "float32[n,5]"), 7, "edges.a.y -> b.x", ["expected 2 dimensions, got 1"]),
    "fed twice": (USER + "  input.x -> b.x:\n", 9, "edges.input.x -> b.x", ["both carry a message at layer 0", "layers that do not meet"]),
    "layers": (USER.replace("-> b.x:", "-> b.x: {layers: x-y}"), 7, "edges.a.y -> b.x.layers", ["not an id or range"]),
    "no layer": (USER.replace("-> b.x:", "-> b.x: {layers: ''}"), 7, "edges.a.y -> b.x.layers", ["names no layer"]),
    "huge layer": (USER.replace("-> b.x:", "-> b.x: {tag: layer=99999}"), 7, "edges.a.y -> b.x.tag", ["too large"]),
    "tag": (USER.replace("-> b.x:", "-> b.x: {tag: next}"), 7, "edges.a.y -> b.x.tag", ["'next' is not a change", "layer+1"]),
    "never fires": (USER.replace("-> b.x:", "-> b.x: {layers: 3}"), 4, "nodes.b", ["never fires", "no message can reach its port x"]),
    "never meet": (USER + "  input.x -> b.z: {tag: layer=2}\n", 4, "nodes.b", ["never fires", "no messages of the same step and layer"]),
    "left waiting": (USER + "  input.x -> b.z:\n  input.q -> b.x: {tag: layer=2}\n",
        4, "nodes.b", ["messages for port x at layer 2 wait forever", "none arrive at z"]),
    "nothing begins": (USER.replace("input.x", "b.z"), 5, "edges", ["no node emits tags"]),
    "no output": (USER.replace("  b.y -> output.y:\n", ""), 5, "edges", ["no edge leads to output"]),
    "node without edges": (USER.replace("edges:", "  c: {operator: ops:c}\nedges:"), 5, "nodes.c", ["no edge leads here"]),
    "cycle": (USER + "  b.w -> a.w:\n",
        9, "edges.b.w -> a.w", ["the cycle a -> b -> a does not advance the tag", "write tag: layer+1 or step+1"]),
    "cycle by layers": (USER + "  b.w -> a.x: {layers: 1}\n  input.q -> b.x: {tag: layer=1}\n",
        9, "edges.b.w -> a.x", ["the cycle ", "does not advance the tag", "layer+1"]),
    "credits of a cycle": (USER.replace("-> b.x:", "-> b.x: {credits: 3}") + "  b.w -> a.x: {tag: layer+1, layers: 0-4}\n",
        7, "edges.a.y -> b.x.credits", ["3 is too few", "8 tags in flight", "at least 8"]),
    "gather without count": (USER.replace("process: right", "process: right, inputs: {x: {takes: gather}}"),
        4, "nodes.b.inputs.x", ["gather needs the port", "count: PORT"]),
    "count without gather": (USER.replace("process: right", "process: right, inputs: {x: {tensors: 'int64[]', count: x}}"),
        4, "nodes.b.inputs.x", ["count belongs to takes: gather"]),
    "response to no edge": (USER.replace("-> output.y:", "-> output.y: {response_to: a.q -> b.x}"),
        8, "edges.b.y -> output.y.response_to", ["no edge 'a.q -> b.x'", "did you mean 'a.y -> b.x'?"]),
    "response elsewhere": (USER.replace("-> output.y:", "-> output.y: {response_to: a.y -> b.x}"),
        8, "edges.b.y -> output.y.response_to", ["comes from process left", "goes to gateway"]),
    "credits of a response": (USER + "  b.z -> a.z: {response_to: a.y -> b.x, credits: 2}\n",
        9, "edges.b.z -> a.z.credits", ["a response needs no credits"]),
    "transport inside": (USER.replace("process: right", "process: left").replace("-> b.x:", "-> b.x: {transport: shm}"),
        7, "edges.a.y -> b.x.transport", ["both ends are in process left"]),
    "open inside": (USER.replace("process: right", "process: left").replace("-> b.x:", "-> b.x: {open: start}"),
        7, "edges.a.y -> b.x.open", ["both ends are in process left"]),
    "inproc": (USER.replace("-> b.x:", "-> b.x: {transport: inproc}"),
        7, "edges.a.y -> b.x.transport", ["from process left to right", "processes: one"]),
    "cores of no process": (USER + "cores: {lef: 2}\n", 9, "cores.lef", ["no node is in a process 'lef'", "did you mean 'left'?"]),
    "threads of no process": (USER + "threads: {lef: 2}\n", 9, "threads.lef", ["no node is in a process 'lef'", "did you mean 'left'?"]),
    "folder": (USER + "folder: nowhere\n", 9, "folder", ["no folder 'nowhere'"]),
    "built-in without model": (USER.replace("ops:a", "gate").replace("a.y", "a.routing"), 3, "nodes.a.operator", ["needs a model"]),
}  # fmt: skip


@pytest.mark.parametrize("name", [*BAD, *BAD_USER])
def test_a_bad_file_ends_in_one_line_that_names_place_and_remedy(name, load, tmp_path: Path) -> None:
    text, line, path, parts = (BAD | BAD_USER)[name]
    with pytest.raises(GraphError) as caught:
        load(text)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / 'g.yaml'}:{line}: {path + ': ' if path else ''}"), message
    assert "\n" not in message
    for part in parts:
        assert part in message
    assert ";" in caught.value.text, "what is wrong; what would be right"
    assert caught.value.exit_code == 2
    assert isinstance(caught.value, UserError)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(GraphError, match=r"none\.yaml: no such file"):
        load_graph(tmp_path / "none.yaml")
    with pytest.raises(GraphError, match="is a folder"):
        load_graph(tmp_path)


@pytest.mark.parametrize(
    ("data", "text"),
    [(b"flowrt: 1\n# \xff\n", r"g\.yaml:2: is not UTF-8"), (b"#" * (65 << 20), "larger than 64 MiB")],
    ids=["no text", "too large"],
)
def test_a_file_that_is_no_text_or_too_large(tmp_path: Path, data: bytes, text: str) -> None:
    (tmp_path / "g.yaml").write_bytes(data)
    with pytest.raises(GraphError, match=text):
        load_graph(tmp_path / "g.yaml")


def test_errors_of_the_model_are_reported_at_its_path(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "g.yaml").write_text(MODEL)

    def refuse(path: Path, implementation: str) -> None:
        raise ValueError("unknown architecture\n  'x'; known: y")

    with pytest.raises(GraphError) as caught:
        load_graph(tmp_path / "g.yaml", facts_of=refuse)
    assert str(caught.value) == f"{tmp_path}/g.yaml:2: model.path: unknown architecture 'x'; known: y"
    with pytest.raises(GraphError, match=r"^--model .*unknown architecture"):
        load_graph(tmp_path / "g.yaml", facts_of=refuse, model_dir=tmp_path / "m")
    with pytest.raises(GraphError, match=r"^--model .*no such folder"):
        load_graph(tmp_path / "g.yaml", facts_of=refuse, model_dir=tmp_path / "n")


def test_a_dense_model_is_refused(load) -> None:
    with pytest.raises(GraphError, match=r"g\.yaml:2: model\.path: the model has no layer with experts"):
        load(MODEL, moe_layers=())


VALID = {
    "short": deploy("groups: 2, micro_batches: 2", "servers: 2, replicas: 2", "  links: {attention-experts: {link: ub, credits: 2}}\n"),
    "explicit": USER,
}
ODD_WORDS = ["null", "true", "-1", "1.5", "''", "[]", "{}", "x.y", "layer=2", "99999999999", "!!x", "&a", "*a", "'", "{", "\ud7ff", '"\\n"']


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(sorted(VALID)), st.integers(0), st.sampled_from(ODD_WORDS))
def test_any_word_changed_ends_in_a_graph_or_in_one_line(form: str, place: int, word: str) -> None:
    here = Path(__file__).parent
    parts = re.split(r"([\w.+=-]+)", VALID[form])
    parts[(place % (len(parts) // 2)) * 2 + 1] = word
    found: GraphError | None = None
    try:
        build_graph(parse_document("".join(parts), "g.yaml"), here, here, lambda *_: FACTS, ("shm",))
    except GraphError as error:
        found = error
    assert found is None or (str(found).isprintable() and ";" in found.text)


def test_name_of_a_standby_process_is_refused(load) -> None:
    text = USER.replace("process: left", "process: standby.0")
    with pytest.raises(GraphError, match=r"nodes\.a\.process: 'standby\.0' is a standby process; choose another name"):
        load(f"{text}reliability: {{standby: 1}}\n")
    load(f"{text}reliability: {{standby: 0}}\n")


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        (("reliability.recovery=off",), "no process that the run can lose"),
        (("deploy.experts.servers=0", "deploy.experts.replicas=1", "deploy.attention.device=cuda"), "processes on the CPU"),
        (("deploy.experts.servers=0", "deploy.experts.replicas=1", "reliability.share_weights=false"), "share their weights"),
    ],
)
def test_standby_process_without_any_to_stand_in_for_is_refused(load, overrides: tuple[str, ...], why: str) -> None:
    text = deploy("groups: 1", "servers: 2, replicas: 2") + "reliability: {standby: 1}\n"
    load(text)
    with pytest.raises(GraphError, match=f"reliability.standby: .*{why}.*; write standby: 0"):
        load(text, *overrides)
