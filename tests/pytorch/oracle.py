"""Logits, losses and gradients of small models in PyTorch (64 bits), for the executor's tests: GPT-2 and
Llama in plain PyTorch, and what Hugging Face's own code makes of the models in models/.

Run where PyTorch and transformers are installed:  python tests/pytorch/oracle.py tests/fixtures/pytorch.json
Models, weights and tokens are those of tests/tests/executor/pytorch.rs: weights and tokens come from
formulas, so that nothing but this file and that one is needed.
"""
import json
import math
import pathlib
import sys

import torch
import torch.nn.functional as F

SEQ, VOCAB, WIDTH, LAYERS = 32, 128, 64, 2
torch.manual_seed(0)


def fill(names):
    """Weights in [-0.1, 0.1] from a hash of element and place of the name in the sorted list; norms around 1."""
    weights = {}
    for c, name in enumerate(sorted(names)):
        shape = names[name]
        n = math.prod(shape)
        values = [0.2 * (mix(i, c) / 2**32 - 0.5) + (1.0 if is_norm(name) else 0.0) for i in range(n)]
        # The executor holds them in 32 bits; from there on everything here is in 64.
        weights[name] = torch.tensor(values, dtype=torch.float32).double().reshape(shape).requires_grad_()
    return weights


def mix(i, c):
    h = (i * 2654435761 + c * 97) % 2**32
    h = (h ^ h >> 15) * 2246822519 % 2**32
    return h ^ h >> 13


def is_norm(name):
    return name.endswith("weight") and any(part in name for part in ("ln_", "norm"))


def tokens():
    stream = [(7 * i * i + 3 * i + i // 5) % VOCAB for i in range(SEQ + 1)]
    return torch.tensor(stream[:-1]), torch.tensor(stream[1:])


def attend(q, k, v):
    scores = (q @ k.transpose(-1, -2)) / math.sqrt(q.shape[-1])
    mask = torch.ones(SEQ, SEQ, dtype=torch.bool).tril()
    return scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v


def heads(x, count):
    return x.reshape(SEQ, count, -1).transpose(0, 1)


def gpt():
    names = {"transformer.wte.weight": (VOCAB, WIDTH), "transformer.wpe.weight": (64, WIDTH)}
    for i in range(LAYERS):
        h = f"transformer.h.{i}."
        for norm in ("ln_1", "ln_2"):
            names |= {f"{h}{norm}.weight": (WIDTH,), f"{h}{norm}.bias": (WIDTH,)}
        for linear, out, inner in (("attn.c_attn", 3 * WIDTH, WIDTH), ("attn.c_proj", WIDTH, WIDTH),
                                   ("mlp.c_fc", 4 * WIDTH, WIDTH), ("mlp.c_proj", WIDTH, 4 * WIDTH)):
            names |= {f"{h}{linear}.weight": (out, inner), f"{h}{linear}.bias": (out,)}
    names |= {"transformer.ln_f.weight": (WIDTH,), "transformer.ln_f.bias": (WIDTH,)}
    w = fill(names)
    ids, labels = tokens()

    def linear(x, name):
        return F.linear(x, w[name + ".weight"], w[name + ".bias"])

    def norm(x, name):
        return F.layer_norm(x, (WIDTH,), w[name + ".weight"], w[name + ".bias"], 1e-5)

    x = w["transformer.wte.weight"][ids] + w["transformer.wpe.weight"][:SEQ]
    for i in range(LAYERS):
        h = f"transformer.h.{i}."
        q, k, v = linear(norm(x, h + "ln_1"), h + "attn.c_attn").split(WIDTH, -1)
        a = attend(heads(q, 4), heads(k, 4), heads(v, 4)).transpose(0, 1).reshape(SEQ, WIDTH)
        x = x + linear(a, h + "attn.c_proj")
        m = F.gelu(linear(norm(x, h + "ln_2"), h + "mlp.c_fc"), approximate="tanh")
        x = x + linear(m, h + "mlp.c_proj")
    logits = norm(x, "transformer.ln_f") @ w["transformer.wte.weight"].T
    return w, logits, F.cross_entropy(logits, labels)


def rope(x):
    d = x.shape[-1]
    frequency = 10000.0 ** (-2.0 * torch.arange(d // 2, dtype=torch.float64) / d)
    angle = torch.arange(SEQ, dtype=torch.float64)[:, None] * frequency
    cos, sin = angle.cos(), angle.sin()
    a, b = x[..., : d // 2], x[..., d // 2 :]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


def llama():
    kv, ffn = 32, 128
    names = {"model.embed_tokens.weight": (VOCAB, WIDTH), "model.norm.weight": (WIDTH,),
             "lm_head.weight": (VOCAB, WIDTH)}
    for i in range(LAYERS):
        h = f"model.layers.{i}."
        names |= {h + "input_layernorm.weight": (WIDTH,), h + "post_attention_layernorm.weight": (WIDTH,),
                  h + "self_attn.q_proj.weight": (WIDTH, WIDTH), h + "self_attn.k_proj.weight": (kv, WIDTH),
                  h + "self_attn.v_proj.weight": (kv, WIDTH), h + "self_attn.o_proj.weight": (WIDTH, WIDTH),
                  h + "mlp.gate_proj.weight": (ffn, WIDTH), h + "mlp.up_proj.weight": (ffn, WIDTH),
                  h + "mlp.down_proj.weight": (WIDTH, ffn)}
    w = fill(names)
    ids, labels = tokens()

    def norm(x, name):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * w[name + ".weight"]

    x = w["model.embed_tokens.weight"][ids]
    for i in range(LAYERS):
        h = f"model.layers.{i}."
        y = norm(x, h + "input_layernorm")
        q = rope(heads(y @ w[h + "self_attn.q_proj.weight"].T, 8))
        k = rope(heads(y @ w[h + "self_attn.k_proj.weight"].T, 4)).repeat_interleave(2, 0)
        v = heads(y @ w[h + "self_attn.v_proj.weight"].T, 4).repeat_interleave(2, 0)
        a = attend(q, k, v).transpose(0, 1).reshape(SEQ, WIDTH)
        x = x + a @ w[h + "self_attn.o_proj.weight"].T
        y = norm(x, h + "post_attention_layernorm")
        m = F.silu(y @ w[h + "mlp.gate_proj.weight"].T) * (y @ w[h + "mlp.up_proj.weight"].T)
        x = x + m @ w[h + "mlp.down_proj.weight"].T
    logits = norm(x, "model.norm") @ w["lm_head.weight"].T
    return w, logits, F.cross_entropy(logits, labels)


def hub(path):
    """What Hugging Face's code makes of the model of a config.json."""
    from transformers import AutoConfig, AutoModelForCausalLM

    settings = json.loads(path.read_text())
    config = AutoConfig.for_model(settings.pop("model_type"), attn_implementation="eager",
                                  experts_implementation="eager", **settings)
    model = AutoModelForCausalLM.from_config(config).double()
    # GPT-NeoX's head has another name in files than in the module.
    head = "embed_out" if config.model_type == "gpt_neox" else "lm_head"
    held = dict(model.named_parameters())
    # Not trained, but with the weights in files.
    held |= {name: b for name, b in model.named_buffers() if name.endswith("e_score_correction_bias")}
    shapes = {name.replace("lm_head", head): tuple(p.shape) for name, p in held.items()}
    kind = config.model_type
    w = fill(apart(shapes, kind))
    here = {name.replace(head, "lm_head"): value for name, value in together(w, shapes, kind).items()}
    ids, labels = tokens()
    logits = torch.func.functional_call(model, here, (ids[None],), {"use_cache": False}).logits[0]
    return w, logits, F.cross_entropy(logits, labels)


def experts_of(name, shape, kind):
    """For a tensor of all experts: the names and shapes of one expert's weights, and the tensor's part of them.
    Most files have these apart; gpt-oss's and Llama 4's do not: gates and ups are columns in turn, or in halves."""
    module, _, tensor = name.rpartition(".experts.")
    tensor, bias = tensor.removesuffix("_bias"), tensor.endswith("_bias")
    if not module or tensor not in ("gate_up_proj", "down_proj"):
        return None
    if kind == "llama4_text":
        parts = (".gate_half", ".up_half") if tensor == "gate_up_proj" else ("",)
        one = (shape[2] // len(parts), shape[1])
        join = lambda w: torch.cat([x.T for x in w], -1)
        return lambda e: {f"{module}.experts.{tensor}.{e}{part}.weight": one for part in parts}, join
    if kind != "gpt_oss":
        parts = ("gate_proj", "up_proj") if tensor == "gate_up_proj" else (tensor,)
        one = (shape[1] // len(parts), shape[2])
        return lambda e: {f"{module}.experts.{e}.{part}.weight": one for part in parts}, torch.cat
    last = "bias" if bias else "weight"
    parts = (".gate", ".up") if tensor == "gate_up_proj" else ("",)
    one = (shape[-1] // len(parts),) if bias else (shape[2] // len(parts), shape[1])
    join = lambda w: torch.stack([x.T if x.ndim == 2 else x for x in w], -1).reshape(shape[1:])
    return lambda e: {f"{module}.experts.{tensor}.{e}{part}.{last}": one for part in parts}, join


# Names in files where the module's differ, by family: parts of names, and what files call them.
FILED = {"ernie4_5_moe": {".gate.moe_statics.": ".moe_statics."},
         "minimax_m2": {".mlp.": ".block_sparse_moe.", ".gate_proj.": ".w1.", ".up_proj.": ".w3.", ".down_proj.": ".w2."}}


def filed(name, kind):
    for ours, theirs in FILED.get(kind, {}).items():
        name = name.replace(ours, theirs)
    return name


def apart(shapes, kind):
    names = {}
    for name, shape in shapes.items():
        experts = experts_of(name, shape, kind)
        for e in range(shape[0]) if experts else ():
            names |= {filed(part, kind): one for part, one in experts[0](e).items()}
        if not experts:
            names[filed(name, kind)] = shape
    return names


def together(w, shapes, kind):
    def whole(name, shape):
        experts = experts_of(name, shape, kind)
        if not experts:
            return w[filed(name, kind)]
        return torch.stack([experts[1]([w[filed(part, kind)] for part in experts[0](e)]) for e in range(shape[0])])

    return {name: whole(name, shape) for name, shape in shapes.items()}


def record(weights, logits, loss):
    loss.backward()
    flat = logits.detach().flatten()
    gradients = {}
    for name, w in sorted(weights.items()):
        g = torch.zeros_like(w).flatten() if w.grad is None else w.grad.flatten()
        places = range(0, g.numel(), max(1, g.numel() // 16))
        gradients[name] = {"largest": g.abs().max().item(), "norm": g.double().norm().item(),
                           "entries": [[i, g[i].item()] for i in places]}
    return {"loss": loss.item(), "gradients": gradients,
            "logits": {"largest": flat.abs().max().item(),
                       "entries": [[i, flat[i].item()] for i in range(0, flat.numel(), 13)]}}


models = {"gpt": gpt(), "llama": llama()}
models |= {path.stem: hub(path) for path in sorted((pathlib.Path(__file__).parent / "models").glob("*.json"))}
recorded = {"torch": torch.__version__} | {name: record(*model) for name, model in models.items()}
with open(sys.argv[1], "w") as file:
    json.dump(recorded, file, separators=(",", ":"))
    file.write("\n")
