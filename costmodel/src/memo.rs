//! A cache of values shared between threads.

use std::hash::Hash;
use std::sync::{Arc, RwLock};

use rustc_hash::FxHashMap;

use crate::CostError;

/// Cached values by key. Two threads may compute the same value at once; both results are equal.
#[derive(Debug)]
pub(crate) struct Memo<K, V>(RwLock<FxHashMap<K, Arc<V>>>);

impl<K, V> Default for Memo<K, V> {
    fn default() -> Self {
        Self(RwLock::default())
    }
}

impl<K: Clone + Eq + Hash, V> Memo<K, V> {
    /// Returns a value from the cache, or computes and stores it.
    ///
    /// # Errors
    /// When the value cannot be computed.
    pub(crate) fn get(
        &self,
        key: &K,
        make: impl FnOnce() -> Result<V, CostError>,
    ) -> Result<Arc<V>, CostError> {
        let poisoned = "no thread panics while holding the memo";
        if let Some(found) = self.0.read().expect(poisoned).get(key) {
            return Ok(Arc::clone(found));
        }
        let value = Arc::new(make()?);
        let mut values = self.0.write().expect(poisoned);
        Ok(Arc::clone(values.entry(key.clone()).or_insert(value)))
    }
}
