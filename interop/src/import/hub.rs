//! Finds models of the library by their names on the Hugging Face hub.

/// Endings of names that say how a model was trained further, not what it is.
const TRAINED_FURTHER: [&str; 8] = [
    "-instruct",
    "-chat",
    "-base",
    "-hf",
    "-it",
    "-pt",
    "-intermediate-step-1431k-3t",
    "-4k",
];

/// Name of the library's model for a name on the hub: `meta-llama/Llama-3.1-8B-Instruct` is `llama3-8b`.
pub(super) fn of_library(id: &str) -> Option<String> {
    let wanted = plain(id);
    let presets = catalog::load::model_names().into_iter();
    let named = |preset: &catalog::load::PresetInfo| {
        let names = std::iter::once(&preset.name).chain(&preset.aliases);
        names.into_iter().any(|name| plain(name) == wanted)
    };
    let mut found = presets.filter(named).map(|preset| preset.name);
    found.next()
}

/// The name in lower case without owner, `meta-`, hyphens, underscores and endings in [`TRAINED_FURTHER`].
fn plain(id: &str) -> String {
    let mut name = id.rsplit('/').next().unwrap_or(id).to_lowercase();
    while let Some(shorter) = TRAINED_FURTHER
        .iter()
        .find_map(|end| name.strip_suffix(end))
    {
        name = shorter.to_owned();
    }
    let name = name.strip_prefix("meta-").unwrap_or(&name);
    name.replace(['-', '_'], "")
}

#[cfg(test)]
mod tests {
    use super::of_library;

    #[test]
    fn names_of_the_hub_are_found() {
        let found = |id: &str| of_library(id);
        for (id, preset) in [
            ("meta-llama/Llama-3.1-8B-Instruct", "llama3-8b"),
            ("meta-llama/Llama-2-7b-hf", "llama2-7b"),
            ("Qwen/Qwen2.5-7B", "qwen2.5-7b"),
            ("Qwen/Qwen3-30B-A3B", "qwen3-30b-a3b"),
            ("Qwen/Qwen2-1.5B-Instruct", "qwen2.5-1.5b"),
            ("Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3-30b-a3b-2507"),
            ("mistralai/Mistral-7B-v0.1", "mistral-7b-v0.1"),
            ("~/model_weights/llama-7b", "llama-7b"),
            ("llama3-8b", "llama3-8b"),
        ] {
            assert_eq!(found(id).as_deref(), Some(preset), "{id}");
        }
        assert_eq!(found("Qwen/Qwen3-4B-Thinking-2507"), None);
        assert_eq!(found(""), None);
    }
}
