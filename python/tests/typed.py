"""What a typed program may write; `mypy --strict` and `pyright` read it, nothing runs it."""

from typing import Any, Dict, List

from vescale_plan import Answer, Plan, Search, diagnose, estimate, generate_plan, search

found: Search = search("llama3-8b", gpus=8, tp=2, max_pp=2, forbid=("cp",), schedule=["1f1b", "zb-v"], sequence_parallel=True)
best: Plan = found.best
first: Plan = found[0]
several: List[Plan] = [plan for plan in found]
same: Plan = generate_plan("llama3-8b", gpus=8, seq_len=4096, tp=2)
mine: Plan = estimate("llama3-8b", best, gpus=8)
mine = estimate("llama3-8b", "tp=2,pp=2", gpus=8, runtime="megatron-core")
explained: Answer = best.explain(why_not="tp=4")
compared: Answer = best.compare(mine)
diagnosed: Answer = diagnose("train.log", mine, warmup=3)
data: Dict[str, Any] = diagnosed.data
text: str = str(explained) + compared._repr_html_() + mine._repr_html_()
mine.report("report.html")
files: Dict[str, str] = mine.export("megatron-lm", launcher="torchrun")
part: Plan = mine.group(1)
shares: List[int] = [group["global_batch"] for group in mine.groups]
