//! A cache of values shared between threads.

use std::hash::Hash;
use std::sync::{Arc, RwLock};

use rustc_hash::FxHashMap;

use crate::CostError;

const POISONED: &str = "no thread panics while holding the memo";

/// Cached values by key. Two threads may compute the same value at once; both results are equal.
#[derive(Debug)]
pub(crate) struct Memo<K, V> {
    values: RwLock<Values<K, V>>,
    limit: Option<Limit<V>>,
}

/// How large a cache may become.
#[derive(Debug)]
struct Limit<V> {
    /// Largest sum of the values' sizes.
    most: usize,
    size: fn(&V) -> usize,
}

#[derive(Debug)]
struct Values<K, V> {
    by_key: FxHashMap<K, Arc<V>>,
    /// Sum of the values' sizes, if they are limited.
    size: usize,
}

impl<K, V> Default for Memo<K, V> {
    fn default() -> Self {
        Self {
            values: RwLock::new(Values {
                by_key: FxHashMap::default(),
                size: 0,
            }),
            limit: None,
        }
    }
}

impl<K, V> Memo<K, V> {
    /// A cache that is emptied when the sizes of its values exceed a limit together.
    pub(crate) fn limited(most: usize, size: fn(&V) -> usize) -> Self {
        Self {
            limit: Some(Limit { most, size }),
            ..Self::default()
        }
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
        match self.find(key) {
            Some(found) => Ok(found),
            None => Ok(self.insert(key.clone(), make()?)),
        }
    }

    /// Returns a value from the cache.
    pub(crate) fn find(&self, key: &K) -> Option<Arc<V>> {
        let values = self.values.read().expect(POISONED);
        values.by_key.get(key).map(Arc::clone)
    }

    /// Stores a value, unless the cache has one for the key; returns the one that it has then.
    pub(crate) fn insert(&self, key: K, value: V) -> Arc<V> {
        let mut values = self.values.write().expect(POISONED);
        if let Some(limit) = &self.limit {
            let size = (limit.size)(&value);
            values.size += size;
            if values.size > limit.most {
                values.size = size;
                values.by_key.clear();
            }
        }
        Arc::clone(values.by_key.entry(key).or_insert_with(|| Arc::new(value)))
    }
}
