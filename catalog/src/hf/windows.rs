//! Windows of attention: which layers of a family have one, and of which kind.

use super::fields::Fields;
use crate::error::SpecError;
use crate::model::WindowPattern;
use crate::window::Window;

/// The window pattern of a model of one of Llama's families.
pub(super) fn pattern(f: &Fields<'_>, kind: &str) -> Result<WindowPattern, SpecError> {
    if kind.starts_with("llama4") {
        return chunks(f);
    }
    let usual = match kind {
        "gemma2" | "gemma3" | "gemma3_text" | "mistral" | "olmo3" => Some(4096),
        "qwen2" | "qwen3" | "qwen2_moe" | "qwen3_moe" => Some(4096),
        "gpt_oss" => Some(128),
        _ => None,
    };
    let qwen = kind.starts_with("qwen");
    let window = f.maybe_or("sliding_window", usual)?;
    let used = !qwen || f.flag("use_sliding_window", false)?;
    let layers = f.usual("num_hidden_layers")?.unwrap_or(0);
    // The layers before this one attend to everything.
    let first = f.maybe("max_window_layers")?.filter(|_| qwen);
    let named = f.texts("layer_types")?;
    let period = f.maybe("sliding_window_pattern")?.unwrap_or(6);
    if let Some(named) = named.as_ref().filter(|_| kind != "qwen3_next") {
        known(f, "layer_types", named, layers, "sliding_attention")?;
    }
    let Some(window) = window.filter(|_| used) else {
        return Ok(WindowPattern::Full);
    };
    let window = Window::Sliding(window);
    if kind == "qwen3_moe" {
        // Its code has one window for all layers, whatever the file lists.
        return Ok(WindowPattern::All { window });
    }
    if let Some(named) = named {
        return of_layers(
            f,
            "layer_types",
            &named,
            layers,
            ("sliding_attention", window),
        );
    }
    Ok(match kind {
        "gemma2" | "gpt_oss" => WindowPattern::Alternating { window, period: 2 },
        "gemma3" | "gemma3_text" => WindowPattern::Alternating { window, period },
        "olmo3" => WindowPattern::Alternating { window, period: 4 },
        "mistral" | "mixtral" | "phi3" | "starcoder2" => WindowPattern::All { window },
        _ if qwen => match first.unwrap_or(28) {
            0 => WindowPattern::All { window },
            first if first >= layers => WindowPattern::Full,
            _ => {
                let message =
                    "windows in the last layers only are not modelled; expected 0, or all layers";
                return Err(f.wrong("max_window_layers", message));
            }
        },
        _ => WindowPattern::Full,
    })
}

/// The pattern of chunked attention in Llama 4. Layers with rotary embeddings attend within chunks,
/// the others to the whole sequence. Every fourth layer has no rotary embeddings, unless the file
/// gives another interval or lists the layers.
fn chunks(f: &Fields<'_>) -> Result<WindowPattern, SpecError> {
    let window = Window::Chunk(f.maybe("attention_chunk_size")?.unwrap_or(8192));
    let layers = f.size("num_hidden_layers")?;
    let period = f.maybe("no_rope_layer_interval")?.unwrap_or(4);
    let mut found = WindowPattern::Alternating { window, period };
    let rotated = f.numbers("no_rope_layers")?.unwrap_or_default();
    let names = ["full_attention", "chunked_attention"];
    let of_rotated = rotated
        .iter()
        .map(|&rotates| names[usize::from(rotates != 0)]);
    let lists = [
        ("no_rope_layers", of_rotated.collect()),
        ("layer_types", f.texts("layer_types")?.unwrap_or_default()),
    ];
    for (index, (field, named)) in lists.iter().enumerate() {
        if named.is_empty() {
            continue;
        }
        let said = of_layers(f, field, named, layers, ("chunked_attention", window))?;
        if index > 0 && said != found {
            let message = "expected chunks in the layers that are rotated, and only there";
            return Err(f.wrong(field, message));
        }
        found = said;
    }
    Ok(found)
}

/// Checks that a list names every layer's attention, as full or windowed.
fn known(
    f: &Fields<'_>,
    field: &str,
    named: &[&str],
    layers: u64,
    windowed: &str,
) -> Result<(), SpecError> {
    if named.len() as u64 != layers {
        return Err(f.wrong(field, "expected as many entries as num_hidden_layers"));
    }
    let other = |name: &&str| !["full_attention", windowed].contains(name);
    if named.iter().any(other) {
        let message = format!("layers other than full_attention and {windowed} are not modelled");
        return Err(f.wrong(field, message));
    }
    Ok(())
}

/// The window pattern of a list that names each layer's attention; fails if no pattern fits it.
fn of_layers(
    f: &Fields<'_>,
    field: &str,
    named: &[&str],
    layers: u64,
    (windowed, window): (&str, Window),
) -> Result<WindowPattern, SpecError> {
    known(f, field, named, layers, windowed)?;
    let full: Vec<bool> = named.iter().map(|name| *name == "full_attention").collect();
    let Some(first) = full.iter().position(|full| *full) else {
        return Ok(WindowPattern::All { window });
    };
    if !full.contains(&false) {
        return Ok(WindowPattern::Full);
    }
    let period = first + 1;
    let mut layers = full.iter().enumerate();
    let regular = layers.all(|(i, full)| *full == (i + 1).is_multiple_of(period));
    if !regular {
        let message =
            "expected every n-th layer to attend to everything, and the others to have a window";
        return Err(f.wrong(field, message));
    }
    let period = period as u64;
    Ok(WindowPattern::Alternating { window, period })
}
