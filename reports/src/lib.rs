//! Show it: terminal tables, the HTML report, the Perfetto trace.

pub mod html;
pub mod perfetto;
pub mod table;
