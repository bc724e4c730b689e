//! What it costs: lowering of traces for a runtime, prices, memory and the event simulator.
