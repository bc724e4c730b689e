"""Judges exports for Megatron Bridge, and Bridge's own recipes, by Bridge's `runtime_config_update`, which ends in
`ConfigContainer.validate()`. What a recipe asks of the hub, a model's `config.json`, is read from a local folder."""

import dataclasses
import importlib
import json
import os
import pathlib
import runpy
import sys
import types
import unittest.mock

MODELS = pathlib.Path(__file__).parents[2] / "catalog/presets/models"
# What defines a model in Megatron-Core's configuration and Bridge's providers.
DEFINES = (
    "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels vocab_size"
    " share_embeddings_and_output_weights normalization layernorm_epsilon layernorm_zero_centered_gamma"
    " add_bias_linear add_qkv_bias qk_layernorm activation_func gated_linear_unit activation_func_clamp_value"
    " glu_linear_offset position_embedding_type rotary_base rotary_percent rotary_interleaved rope_scaling"
    " rope_scaling_factor seq_len_interpolation_factor yarn_rotary_scaling_factor yarn_original_max_position_embeddings"
    " yarn_beta_fast yarn_beta_slow yarn_correction_range_round_to_int softmax_type window_size window_attn_skip_freq"
    " num_moe_experts moe_router_topk moe_ffn_hidden_size moe_shared_expert_intermediate_size moe_shared_expert_gate"
    " moe_router_score_function moe_router_pre_softmax moe_router_topk_scaling_factor moe_router_num_groups"
    " moe_router_group_topk moe_router_enable_expert_bias multi_latent_attention q_lora_rank kv_lora_rank"
    " qk_head_dim qk_pos_emb_head_dim v_head_dim rotary_scaling_factor mscale mscale_all_dim beta_fast beta_slow"
).split()


class Stop(Exception):
    """Raised in place of starting ranks: the configuration is final then."""


def hub_config(folder, preset):
    """Writes the `config.json` of a model of the library as the hub has it."""
    from transformers.models.auto import modeling_auto

    config = json.loads((MODELS / f"{preset}.json").read_text())
    architecture = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config["model_type"]]
    config |= {"architectures": [architecture], "torch_dtype": "bfloat16"}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


# Models of the hub that the library has under another name, because they are alike in what their recipes set.
ALIKE = {"llama3.1-8b": "llama3-8b", "llama3.1-70b": "llama3-70b", "qwen2-0.5b": "qwen2.5-0.5b", "qwen2-1.5b": "qwen2.5-1.5b", "qwen2-7b": "qwen2.5-7b", "qwen2-72b": "qwen2.5-72b"}


def of_library(name):
    """The model of the library for a name on the hub."""

    def plain(text):
        return text.lower().removeprefix("meta-").removesuffix("-hf").replace("-", "")

    known = {plain(path.stem): path.stem for path in MODELS.glob("*.json")} | {plain(a): b for a, b in ALIKE.items()}
    return known[plain(name.rsplit("/", 1)[-1])]


def recipe(module, function, world, hub):
    """The final configuration of one of Bridge's recipes, with models of the hub from folders below `hub`."""
    from megatron.bridge import AutoBridge

    take = AutoBridge.from_hf_pretrained

    def from_folder(name, **options):
        model = of_library(name)
        return take(hub_config(hub / model, model), **options)

    AutoBridge.from_hf_pretrained = from_folder
    as_on_gpus(world)
    return final(getattr(importlib.import_module(module), function)())


def own_model(folder):
    """The model that Bridge itself makes of a `config.json`."""
    from megatron.bridge import AutoBridge
    from transformers import AutoConfig

    return AutoBridge.from_hf_config(AutoConfig.from_pretrained(folder)).to_megatron_provider(load_weights=False)


def as_on_gpus(world):
    """What Bridge asks the machine: its ranks, and the architecture of its GPU, for which Hopper stands in."""
    import torch

    os.environ.update({"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": str(world)})
    hopper = unittest.mock.MagicMock(major=9, minor=0)
    hopper.name = "NVIDIA H100 80GB HBM3"
    torch.cuda.get_device_properties = lambda *_: hopper
    torch.cuda.get_device_capability = lambda *_: (9, 0)


def final(config):
    """The configuration that Bridge trains with, after all of its checks."""
    from megatron.bridge.training.config import runtime_config_update

    runtime_config_update(config)
    return config


def started(script, words):
    """The final configuration of an exported script, run as its launcher would up to where ranks would start."""
    from megatron.bridge.recipes.common import _pretrain_common
    from megatron.bridge.training import pretrain as module

    recipe = types.ModuleType("recipe")
    recipe.make = lambda: based(_pretrain_common())
    sys.modules["recipe"] = recipe
    seen = []

    def stop(state, *_args, **_kwargs):
        seen.append(state.cfg)
        raise Stop

    module.setup = stop
    sys.argv = [str(script), *words]
    try:
        runpy.run_path(str(script), run_name="__main__")
    except Stop:
        return seen[0]
    raise SystemExit("the script does not start a training")


def based(config):
    """A recipe's container; a model that Bridge has no family for starts as its plain GPT."""
    from megatron.bridge.models import GPTModelProvider

    config.model = GPTModelProvider(num_layers=1, hidden_size=64, num_attention_heads=1)
    config.optimizer.lr = 1e-4
    return config


def fields_of(part):
    """The fields of a configuration, with those of the transformer in it."""
    names = {field.name for field in dataclasses.fields(part)}
    inner = getattr(part, "transformer", None)
    return names | (fields_of(inner) if dataclasses.is_dataclass(inner) else set())


def shown(value):
    """A value in a form that compares."""
    if callable(value):
        return getattr(value, "__name__", str(value))
    return list(value) if isinstance(value, tuple) else value


def stages(model):
    """Decoder layers of each virtual stage, as Megatron-Core places them."""
    ranks, chunks = model.pipeline_model_parallel_size, model.virtual_pipeline_model_parallel_size or 1
    layout = model.pipeline_model_parallel_layout
    if layout is None:
        count, rest = divmod(model.num_layers, ranks * chunks)
        return [count] * (ranks * chunks) if rest == 0 else [model.num_layers]
    return [
        sum(kind.name == "decoder" for kind in layout.layout[rank][chunk]) for chunk in range(chunks) for rank in range(ranks)
    ]


def later_tokens(preset):
    """Layers that predict later tokens, by the model's `config.json`; some of Bridge's families leave them out."""
    config = json.loads((MODELS / f"{preset}.json").read_text())
    modules = config.get("num_mtp_modules", 0) if config.get("use_mtp") else 0
    return config.get("num_nextn_predict_layers") or modules


def differences(found, own, plan):
    """Fields that define the model and differ from those of Bridge's own model of the same `config.json`, as
    `name: found, not expected`."""
    out = []
    if found.num_layers != sum(plan["stages"]):
        out.append(f"num_layers: {found.num_layers}")
    if (found.mtp_num_layers or 0) != later_tokens(plan["model"]):
        out.append(f"mtp_num_layers: {found.mtp_num_layers}, not {later_tokens(plan['model'])}")
    if own is None:
        return out
    own.finalize()
    for name in DEFINES:
        if name not in fields_of(own):
            continue
        if name == "moe_router_pre_softmax" and own.moe_router_score_function != "softmax":
            continue  # Nothing reads it then.
        a, b = shown(getattr(found, name, None)), shown(getattr(own, name))
        if a != b:
            out.append(f"{name}: {a!r}, not {b!r}")
    return out
