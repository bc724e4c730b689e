//! The names by which the pools of a cluster are called.

use crate::cluster::{Pool, Pools};
use crate::mistake::Mistake;
use crate::suggest;

impl Pools {
    /// Each pool's name: its cluster as the user named it, or `pool 2` if several have that name.
    #[must_use]
    pub fn names(&self) -> Vec<String> {
        let name = |(number, pool): (usize, &Pool)| {
            let alike = self.parts.iter().filter(|other| other.arg == pool.arg);
            match alike.count() {
                1 => pool.arg.clone(),
                _ => format!("pool {number}"),
            }
        };
        (1..).zip(&self.parts).map(name).collect()
    }

    /// The names of all pools with their sizes, as messages list them.
    #[must_use]
    pub fn listed(&self) -> String {
        let listed = |(name, pool): (String, &Pool)| match name == pool.arg {
            true => format!("{name} ({} GPUs)", pool.gpus),
            false => format!("{name} ({} GPUs of {})", pool.gpus, pool.arg),
        };
        let pools = self.names().into_iter().zip(&self.parts);
        let pools: Vec<String> = pools.map(listed).collect();
        pools.join(", ")
    }

    /// The cluster of the named pools, in order: `dgx2-v100 + dgx-a100`, or as `--cluster` lists.
    ///
    /// # Errors
    /// When a name matches no pool or several, or a pool is named twice.
    pub fn chosen(&self, line: &str) -> Result<Pool, Mistake> {
        if let Some(known) = self
            .arrangements()
            .into_iter()
            .find(|pool| pool.arg == line)
        {
            return Ok(known);
        }
        let mut order = Vec::new();
        for name in line.split(" + ") {
            // `64 x dgx-a100` is written with its size, which is that of the whole pool.
            let name = name.split_once(" x ").map_or(name, |(_, name)| name);
            let at = self.named(name)?;
            if order.contains(&at) {
                let wrong = Mistake::new(format!("`{}` is named twice", self.names()[at]));
                return Err(wrong.expected(format!("each once: {}", self.listed())));
            }
            order.push(at);
        }
        Ok(self.in_order(&order))
    }

    /// Index of a pool by name: `pool 2`, the cluster's name, or the beginning of its GPU's name.
    ///
    /// # Errors
    /// When no pool has the name, or several have it.
    pub fn named(&self, name: &str) -> Result<usize, Mistake> {
        let name = name.trim();
        let at = |is: &dyn Fn(&Pool) -> bool| {
            let pools = self.parts.iter().enumerate();
            let found = pools.filter(|(_, pool)| is(pool)).map(|(at, _)| at);
            found.collect::<Vec<usize>>()
        };
        let number = name.strip_prefix("pool").map(str::trim);
        let number = number.and_then(|number| number.parse::<usize>().ok());
        let mut found: Vec<usize> = number
            .and_then(|number| number.checked_sub(1))
            .filter(|&at| at < self.parts.len())
            .into_iter()
            .collect();
        if found.is_empty() {
            found = at(&|pool| pool.arg == name);
        }
        if found.is_empty() && !name.is_empty() {
            let asked = name.to_ascii_lowercase();
            found = at(&|pool| pool.cluster.device.name.starts_with(&asked));
        }
        let wrong = match found[..] {
            [only] => return Ok(only),
            [] => {
                let wrong = Mistake::new(format!("no pool is called `{name}`"));
                let names = self.names();
                let names = names.iter().map(String::as_str);
                wrong.nearest(suggest::nearest(name, names.collect::<Vec<_>>()))
            }
            _ => Mistake::new(format!("{} pools are called `{name}`", found.len())),
        };
        Err(wrong.expected(format!("one of {}", self.listed())))
    }
}

impl Pool {
    /// The pool as an argument with its size: `64 x dgx-a100`; several pools as one line.
    #[must_use]
    pub fn named(&self) -> String {
        match &self.cluster.pools {
            Some(_) => self.arg.clone(),
            None => format!("{} x {}", self.gpus, self.arg),
        }
    }
}
