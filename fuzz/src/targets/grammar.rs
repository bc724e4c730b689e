//! Strategies as text: `tp=8,pp=4,zero=1`.

use interop::export::Dialect;

use crate::mutate;
use crate::outcome::Outcome;
use crate::promises;
use crate::rng::{Rng, hash};
use crate::scene::Scene;
use crate::target::{Depth, Pool, Target};

const SIZES: [&str; 10] = [
    "tp",
    "pp",
    "vpp",
    "cp",
    "ep",
    "etp",
    "dp_shard",
    "dp_replicate",
    "mbs",
    "m",
];
const CHOICES: [(&str, &[&str]); 11] = [
    ("cp_kind", &["ring", "all_gather", "all_to_all"]),
    ("grad_dtype", &["fp32", "bf16", "fp32/bf16", "fp64"]),
    (
        "optim_states",
        &[
            "own",
            "split_master",
            "bf16_moments",
            "8bit_moments",
            "fp32",
        ],
    ),
    (
        "offload",
        &[
            "none",
            "optimizer",
            "optimizer:50",
            "parameters",
            "optimizer:0",
        ],
    ),
    ("zero", &["0", "1", "2", "3", "4"]),
    ("reshard", &["on", "off", "true"]),
    ("sp", &["on", "off"]),
    (
        "recompute",
        &[
            "none",
            "selective",
            "full",
            "layers:2",
            "layers:0",
            "falling:2",
            "falling:40",
            "selective_ops",
        ],
    ),
    (
        "schedule",
        &[
            "1f1b",
            "interleaved",
            "gpipe",
            "zb-h1",
            "zb-v",
            "dualpipe-v",
        ],
    ),
    (
        "order",
        &[
            "tp-cp-dp_shard-dp_replicate-pp",
            "tp-cp-pp-dp_shard-dp_replicate",
        ],
    ),
    (
        "overlap",
        &["none", "grad", "grad+param", "grad+param+tp+pp", "pp"],
    ),
];

/// A strategy whose sizes multiply to the scene's, more often than not.
pub(super) fn random(scene: &Scene, rng: &mut Rng) -> String {
    let mut parts: Vec<String> = Vec::new();
    let mut left = scene.gpus;
    for key in ["tp", "pp", "cp"] {
        let size = 1u64 << rng.below(4);
        if left.is_multiple_of(size) && rng.percent(60) {
            left /= size;
            parts.push(format!("{key}={size}"));
        }
    }
    for (key, values) in CHOICES {
        if rng.percent(25) {
            parts.push(format!("{key}={}", rng.pick(values)));
        }
    }
    for key in ["vpp", "ep", "etp", "dp_shard", "dp_replicate", "mbs"] {
        if rng.percent(12) {
            parts.push(format!("{key}={}", 1u64 << rng.below(4)));
        }
    }
    if rng.percent(12) {
        let stages: Vec<String> = (0..1 + rng.below(4))
            .map(|_| rng.below(14).to_string())
            .collect();
        parts.push(format!("stages={}", stages.join("/")));
    }
    if rng.percent(5) {
        parts.push(format!("{}={}", rng.pick(&SIZES), mutate::number("4", rng)));
    }
    parts.join(",")
}

/// The strategy grammar with legality, pricing, exports and imports.
pub(super) fn grammar() -> Target {
    Target::of_text("grammar", seeds, changed, read)
}

fn seeds() -> Vec<Vec<u8>> {
    let texts = [
        "",
        "tp=8",
        "pp=2,stages=6/6",
        "tp=2,pp=2,vpp=2,schedule=interleaved,zero=1,recompute=selective",
        "dp_shard=8,zero=3,reshard=on,recompute=full,overlap=grad+param",
        "cp=2,cp_kind=ring,tp=2,sp=on,mbs=2,m=16",
        "pp=4,vpp=2,schedule=zb-v,stages=1/1/2/2/2/2/1/1,order=tp-cp-dp_shard-dp_replicate-pp",
    ];
    let scene = Scene::default();
    texts
        .iter()
        .map(|t| format!("{scene}\n{t}").into_bytes())
        .collect()
}

fn changed(pool: &Pool, rng: &mut Rng) -> Vec<u8> {
    if rng.percent(60) {
        let scene = Scene::random(rng);
        let text = random(&scene, rng);
        return format!("{scene}\n{text}").into_bytes();
    }
    mutate::text(pool, rng)
}

fn read(text: &str, depth: Depth) -> Outcome {
    let (scene, text) = Scene::split(text);
    let scenario = match scene.scenario() {
        Ok(scenario) => scenario,
        Err(error) => return Outcome::malformed(&error),
    };
    let (model, w, runtime) = (&scenario.model, &scenario.workload, &scenario.runtime);
    let strategy = match plans::grammar::parse(text, model, w, runtime) {
        Ok(strategy) => strategy,
        Err(plans::StrategyError::Syntax(mistake)) => {
            return Outcome::malformed(&mistake.to_string());
        }
        Err(error) => return Outcome::refused(&error),
    };
    let d = strategy.decisions();
    let many = |n: u64| if n > 1 { 'n' } else { '1' };
    let mut outcome = Outcome::accepted(format!(
        "tp{} pp{} vpp{} cp{} ep{} zero{} {:?} {:?}",
        many(d.tp),
        many(d.pp),
        many(d.vpp),
        many(d.cp),
        many(d.ep),
        u8::from(d.zero),
        d.schedule,
        d.recompute
    ));
    promises::of_strategy(&scenario, &strategy, &mut outcome);
    if depth == Depth::Use {
        promises::predicted(&scenario, &strategy, &mut outcome);
        let dialect = Dialect::ALL[(hash(text.as_bytes()) % Dialect::ALL.len() as u64) as usize];
        promises::round_trip(&scenario, &strategy, dialect, &mut outcome);
    }
    outcome
}
