//! Parts that several families share: norms, the dimension of a head, how much of it is rotated.

use super::fields::Fields;
use super::unread;
use crate::error::SpecError;
use crate::model::{Attention, AttentionKind, Norm, NormKind, Position};

pub(super) const RMS_NORM: Norm = Norm {
    kind: NormKind::RmsNorm,
    bias: false,
};

pub(super) const LAYER_NORM: Norm = Norm {
    kind: NormKind::LayerNorm,
    bias: true,
};

/// The hidden size divided by the number of heads, for files that give no head dimension; fails if it does not divide.
pub(super) fn head_dim(f: &Fields<'_>, hidden: u64, heads: u64) -> Result<u64, SpecError> {
    if heads == 0 || hidden.is_multiple_of(heads) {
        return Ok(hidden.checked_div(heads).unwrap_or(0));
    }
    let (below, above) = (hidden / heads * heads, hidden.div_ceil(heads) * heads);
    let near = match below {
        0 => format!("at least {above}"),
        below => format!("the nearest that are: {below}, {above}"),
    };
    let message = format!("{hidden} is not divisible by {heads} attention heads; expected {near}");
    Err(f.wrong("hidden size", message))
}

/// Share of a head's dimensions that is rotated, from MiniMax's field `rotary_dim`.
fn rotary_dim(f: &Fields<'_>, head: u64) -> Result<f64, SpecError> {
    let dims = f.maybe("rotary_dim")?.unwrap_or(head);
    Ok(dims as f64 / head.max(1) as f64)
}

/// Rotary positions: how many dimensions of a head are rotated. Some families' code rotates only a share of them.
pub(super) fn rotated(
    f: &Fields<'_>,
    kind: &str,
    attention: &Attention,
) -> Result<Position, SpecError> {
    let head = match attention.kind {
        AttentionKind::Latent { qk_rope_dim, .. } => qk_rope_dim,
        AttentionKind::Grouped { head_dim, .. } => head_dim,
    };
    let (names, usual): (&[&str], f64) = match kind {
        "gpt_neox" => (&["rotary_pct"], 0.25),
        "nemotron" => (&["rope_percent", "rope_percentage"], 0.5),
        "phi3" => (&[], 1.0),
        "qwen3_next" => (&[], 0.25),
        "glm4_moe" => (&[], 0.5),
        "minimax_m2" => (&[], rotary_dim(f, head)?),
        _ => {
            if let Some(rope) = f.nested("rope_parameters")? {
                unread::check(&rope, kind)?;
            }
            return Ok(Position::Rope { dims: head });
        }
    };
    let mut share = match f.nested("rope_parameters")? {
        Some(rope) => rope.real("partial_rotary_factor")?,
        None => None,
    };
    for name in ["partial_rotary_factor"].iter().chain(names) {
        let said = f.real(name)?;
        share = share.or(said);
    }
    // The product is rounded down, as the families' code does.
    let dims = (head as f64 * share.unwrap_or(usual)) as u64;
    Ok(Position::Rope { dims })
}

/// The text of a field, if it is present; fails if the text is not one of `known`.
pub(super) fn one_of<'a>(
    f: &Fields<'a>,
    field: &str,
    known: &[&str],
) -> Result<Option<&'a str>, SpecError> {
    let said = f.maybe_text(field)?;
    match said.filter(|said| !known.contains(said)) {
        Some(other) => {
            let message = format!("{other} is not modelled; expected {}", known.join(" or "));
            Err(f.wrong(field, message))
        }
        None => Ok(said),
    }
}
