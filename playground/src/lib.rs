//! The planner as a WebAssembly module, which a worker of the page in `site/` calls.
//!
//! Questions and answers are JSON texts. The search runs on the thread that asks: without threads, `rayon` works where it
//! is called.

mod answer;
mod question;

use wasm_bindgen::prelude::wasm_bindgen;

use crate::answer::Answer;
use crate::question::Asked;

#[wasm_bindgen]
extern "C" {
    /// The browser's clock in milliseconds (`performance.now`).
    #[wasm_bindgen(js_namespace = performance)]
    fn now() -> f64;
    /// What the worker does when a share of the search is done.
    #[wasm_bindgen(js_namespace = self, js_name = showProgress)]
    fn show_progress(share: f64);
    /// What the worker does before the module stops because of a fault of its own.
    #[wasm_bindgen(js_namespace = self, js_name = showFault)]
    fn show_fault(message: &str);
}

/// Prepares the module; a fault is reported in words.
#[wasm_bindgen(start)]
pub fn start() {
    std::panic::set_hook(Box::new(|fault| show_fault(&fault.to_string())));
}

/// The models, clusters and runtimes that a question may name, as JSON.
#[wasm_bindgen]
#[must_use]
pub fn presets() -> String {
    text(&question::presets())
}

/// Answers a question, a JSON object of the page's fields, with text as wide as this many characters.
#[wasm_bindgen]
#[must_use]
pub fn answer(asked: &str, columns: u32) -> String {
    let asked: Result<Asked, _> = serde_json::from_str(asked);
    let answer = match asked {
        Ok(asked) => Answer::to(&asked, columns, &now, &show_progress),
        Err(wrong) => Answer::none(catalog::Mistake::new(wrong.to_string())),
    };
    text(&answer)
}

/// A document as JSON; documents of this crate have keys that are texts, so they can always be written.
fn text<T: serde::Serialize>(document: &T) -> String {
    serde_json::to_string(document).unwrap_or_default()
}
