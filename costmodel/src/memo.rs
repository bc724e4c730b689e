//! Values that are made once and shared between threads.

use std::hash::Hash;
use std::sync::{Arc, RwLock};

use rustc_hash::FxHashMap;

use crate::CostError;

/// Values by key. Two threads may make the same value; both are equal.
#[derive(Debug)]
pub(crate) struct Memo<K, V>(RwLock<FxHashMap<K, Arc<V>>>);

impl<K, V> Default for Memo<K, V> {
    fn default() -> Self {
        Self(RwLock::default())
    }
}

impl<K: Clone + Eq + Hash, V> Memo<K, V> {
    /// Looks a value up, or makes and stores it.
    ///
    /// # Errors
    /// When it cannot be made.
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
