import os
from typing import Any, Dict, List, Optional, Tuple, TypedDict, Union

_Path = Union[str, "os.PathLike[str]"]

__version__: str
CLUSTER: str
HEADROOM: float

class Answer:
    """An answer, as the command line gives it: `str()` is the text for people."""

    @property
    def data(self) -> Dict[str, Any]:
        """The answer as a dictionary: the document that `--json` prints."""

    def _repr_html_(self) -> str: ...

class Plan:
    """A plan: decisions, what they were made for, and what they were predicted to cost."""

    @staticmethod
    def from_file(path: _Path) -> Plan:
        """Reads a plan file; `ValueError` names file, line and field when it is malformed."""

    @staticmethod
    def from_yaml(text: str) -> Plan:
        """Reads a plan file's text."""

    def export(
        self,
        to: str,
        *,
        launcher: Optional[str] = None,
        tokenizer: Optional[str] = None,
        data: Optional[str] = None,
        hf_id: Optional[str] = None,
    ) -> Dict[str, str]:
        """The files of an export, by name: the plan in a training system's own configuration, such as `megatron-lm` or
        `torchtitan@0.2`, with a launch script (`torchrun`, `slurm`, `kubernetes`) if one is asked for; `ValueError`
        names what the system cannot express."""

    def explain(self, *, why_not: Optional[str] = None) -> Answer:
        """Where time and memory go, and what changing one decision does; `why_not` is another strategy to compare
        with. `ValueError` if that strategy is not legal."""

    def compare(self, other: Plan) -> Answer:
        """This plan and another, part by part."""

    def report(self, path: _Path) -> None:
        """Writes the HTML report: one file that opens offline."""

    def _repr_html_(self) -> str: ...
    def __hash__(self) -> int: ...
    def __eq__(self, other: object) -> bool: ...
    def save(self, path: _Path) -> None:
        """Writes the plan file."""

    def to_yaml(self) -> str:
        """The plan file's text."""

    @property
    def strategy(self) -> Dict[str, Any]:
        """The decisions; those of the first group where replicas differ."""

    @property
    def groups(self) -> List[Dict[str, Any]]:
        """The groups of replicas, where not all replicas are alike: each with its `cluster`, `gpus`, `global_batch`,
        `strategy` and `prediction`. Empty if all are alike."""

    def group(self, number: int) -> "Plan":
        """The plan of one of the groups, counted from 1: a job on the group's pools with its share of the batch."""

    @property
    def predicted(self) -> Dict[str, Any]:
        """What was predicted: `step_time_s`, `peak_memory_bytes`, `mfu` (causal attention counted
        once), `mfu_palm` (as if nothing were masked), `breakdown` and more."""

    @property
    def workload(self) -> Dict[str, Any]:
        """GPUs, tokens per sequence, sequences per step, precision."""

    @property
    def sharding(self) -> Dict[str, Any]:
        """Placements by name pattern."""

    @property
    def strategy_text(self) -> str:
        """The decisions on one line, as `estimate` and the command line take them."""

    @property
    def id(self) -> str:
        """Content hash of the decisions."""

    @property
    def model(self) -> str:
        """Model preset or path."""

    @property
    def cluster(self) -> str:
        """Cluster preset or path."""

    @property
    def runtime(self) -> str:
        """Runtime preset."""

class Given(TypedDict):
    model: str
    config: Optional[str]
    cluster: str
    gpus: int
    runtime: str
    seq_len: Optional[int]
    global_batch: Optional[int]
    lengths: Optional[str]
    packing: Optional[str]
    precision: str
    headroom: float

class Search:
    def __init__(
        self,
        given: Given,
        fix: List[str],
        bounds: Tuple[List[str], List[str]],
        forbid: List[str],
        objective: str,
    ) -> None: ...
    def first(self, count: int) -> List[Plan]: ...

def estimate(given: Given, strategy: str) -> Plan: ...
def diagnose(log: _Path, plan: Plan, warmup: Optional[int]) -> Answer: ...
