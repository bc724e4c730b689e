//! Which decoder layers each virtual stage holds.

use serde::{Deserialize, Serialize};

/// Largest number of stages in a partition.
pub const MAX_STAGES: u64 = 1 << 16;
/// Largest number of ways in which layers are divided over pools that differ in speed.
pub const MAX_BY_POOL: usize = 512;

/// Decoder layers per virtual stage, in model order: `pp · vpp` entries. The embedding is on the
/// first stage, final norm, head and loss on the last; an entry may be 0.
#[derive(
    Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, schemars::JsonSchema,
)]
#[serde(transparent)]
pub struct StagePartition(pub Vec<u64>);

impl StagePartition {
    /// Layers of the stage that has most of them.
    #[must_use]
    pub fn largest(&self) -> u64 {
        self.0.iter().copied().max().unwrap_or(0)
    }

    /// Divides layers as evenly as possible. A remainder goes to the earlier stages after the first, because the first
    /// also holds the embedding and the last the head. At most [`MAX_STAGES`] stages are listed; no legal strategy has
    /// more.
    #[must_use]
    pub fn even(layers: u64, stages: u64) -> Self {
        let stages = stages.clamp(1, MAX_STAGES);
        let base = layers / stages;
        let mut extra = layers % stages;
        let mut sizes = vec![base; stages as usize];
        let order = (1..stages.saturating_sub(1)).chain([0]).chain([stages - 1]);
        for stage in order {
            if extra == 0 {
                break;
            }
            sizes[stage as usize] += 1;
            extra -= 1;
        }
        Self(sizes)
    }

    /// Divides layers evenly, except for `less_first` and `less_last` fewer layers on the first and last stage, which
    /// hold embedding and head; `None` if the rest does not divide evenly or goes negative.
    #[must_use]
    pub fn lighter_ends(layers: u64, stages: u64, less_first: u64, less_last: u64) -> Option<Self> {
        let total = layers.checked_add(less_first)?.checked_add(less_last)?;
        if !(2..=MAX_STAGES).contains(&stages) || !total.is_multiple_of(stages) {
            return None;
        }
        let each = total / stages;
        let mut sizes = vec![each; stages as usize];
        sizes[0] = each.checked_sub(less_first)?;
        let last = sizes.len() - 1;
        sizes[last] = sizes[last].checked_sub(less_last)?;
        Some(Self(sizes))
    }

    /// Divides layers over ranks of several pools, in every way that gives all ranks of a pool the
    /// same number, but for a remainder in one. `pool_of_rank` is ascending; `rank_of_stage` has a
    /// rank for every virtual stage. Ranks divide their layers as evenly as possible; no stage is
    /// empty. With over two stages per rank, ranks outside the uneven pool have a multiple of that.
    /// Above [`MAX_BY_POOL`] ways, only larger multiples remain.
    #[must_use]
    pub fn by_pool(layers: u64, pool_of_rank: &[usize], rank_of_stage: &[u32]) -> Vec<Self> {
        let ranks: Vec<u64> = (pool_of_rank.chunk_by(|a, b| a == b))
            .map(|pool| pool.len() as u64)
            .collect();
        let first = match (rank_of_stage.len() / pool_of_rank.len().max(1)) as u64 {
            0..=2 => 1,
            each => each,
        };
        let mut step = first;
        loop {
            let mut found = Vec::new();
            for uneven in 0..ranks.len() {
                let mut sizes = vec![0; ranks.len()];
                share(layers, step, &ranks, uneven, 0, &mut sizes, &mut found);
            }
            found.sort_unstable();
            found.dedup();
            let ways = found.iter().filter_map(|of| over_stages(of, rank_of_stage));
            let ways: Vec<Self> = ways.collect();
            if ways.len() <= MAX_BY_POOL || step > layers {
                return ways;
            }
            step += first;
        }
    }

    /// The sizes as text in which `NxL` stands for `N` stages of `L` layers: `126x2/1`.
    #[must_use]
    pub fn runs(&self) -> String {
        let runs = self.0.chunk_by(|a, b| a == b).map(|run| match run.len() {
            1 => run[0].to_string(),
            many => format!("{many}x{}", run[0]),
        });
        runs.collect::<Vec<_>>().join("/")
    }

    /// Reads sizes separated by `/`, each as `L` or `NxL`; `None` if the text has another form.
    #[must_use]
    pub fn read(text: &str) -> Option<Self> {
        let mut sizes = Vec::new();
        for part in text.split('/') {
            let (times, layers) = part.split_once(['x', '×']).unwrap_or(("1", part));
            let times: usize = times.parse().ok()?;
            if sizes.len().checked_add(times)? > MAX_STAGES as usize {
                return None;
            }
            sizes.extend(std::iter::repeat_n(layers.parse::<u64>().ok()?, times));
        }
        Some(Self(sizes))
    }

    /// Number of layers in all stages; saturates, so that an overflow counts as more layers than any model has.
    #[must_use]
    pub fn layers(&self) -> u64 {
        self.0.iter().copied().fold(0, u64::saturating_add)
    }

    /// Whether all stages have the same number of layers.
    #[must_use]
    pub fn is_uniform(&self) -> bool {
        self.0.windows(2).all(|pair| pair[0] == pair[1])
    }
}

/// Divides each rank's layers over its virtual stages. `of_ranks` has the layers of every rank.
/// `None` if a stage would have no layer.
fn over_stages(of_ranks: &[u64], rank_of_stage: &[u32]) -> Option<StagePartition> {
    let each = (rank_of_stage.len() / of_ranks.len().max(1)) as u64;
    if of_ranks.iter().any(|&layers| layers < each) {
        return None;
    }
    let divided = of_ranks
        .iter()
        .map(|&layers| StagePartition::even(layers, each));
    let mut left: Vec<_> = divided.map(|stages| stages.0.into_iter()).collect();
    let stages = rank_of_stage.iter();
    let stages = stages.map(|&rank| left[rank as usize].next());
    stages.collect::<Option<_>>().map(StagePartition)
}

/// Adds to `found` all ways to divide the `left` layers over the pools from `pool` on: ranks of a
/// pool get the same multiple of `step`, those of `uneven` the rest. `sizes`: layers per rank.
fn share(
    left: u64,
    step: u64,
    ranks: &[u64],
    uneven: usize,
    pool: usize,
    sizes: &mut Vec<u64>,
    found: &mut Vec<Vec<u64>>,
) {
    if pool == ranks.len() {
        if left < ranks[uneven] {
            return;
        }
        let mut stages = Vec::new();
        for (at, (&count, &each)) in ranks.iter().zip(sizes.iter()).enumerate() {
            match at == uneven {
                true => stages.extend(StagePartition::even(left, count).0),
                false => stages.extend((0..count).map(|_| each)),
            }
        }
        found.push(stages);
        return;
    }
    if pool == uneven {
        share(left, step, ranks, uneven, pool + 1, sizes, found);
        return;
    }
    for each in (1..).map(|times| times * step) {
        let Some(rest) = left.checked_sub(each * ranks[pool]) else {
            return;
        };
        sizes[pool] = each;
        share(rest, step, ranks, uneven, pool + 1, sizes, found);
    }
}
