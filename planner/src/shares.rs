//! Shares of a batch: the division among several groups whose slowest group takes least.

/// The shares, one for each group and adding up to `total`, whose largest time is least, with that time. `times[g][n]` is
/// what group `g` takes for `n`; only those at most `within` count. `None` if no such shares add up.
pub(crate) fn least(times: &[Vec<f64>], total: usize, within: f64) -> Option<(f64, Vec<usize>)> {
    let (last, others) = times.split_last()?;
    // For every sum of the shares of the groups so far: the least time of the slowest.
    let mut so_far = vec![f64::INFINITY; total + 1];
    so_far[0] = 0.0;
    let mut chosen: Vec<Vec<usize>> = Vec::with_capacity(others.len());
    for times in others {
        let shares: Vec<usize> = (1..=total).filter(|&n| times[n] <= within).collect();
        let mut next = vec![f64::INFINITY; total + 1];
        let mut choice = vec![0; total + 1];
        for (sum, &before) in so_far.iter().enumerate().filter(|(_, t)| t.is_finite()) {
            for &share in shares.iter().take_while(|&&share| sum + share <= total) {
                let slowest = before.max(times[share]);
                if slowest < next[sum + share] {
                    next[sum + share] = slowest;
                    choice[sum + share] = share;
                }
            }
        }
        so_far = next;
        chosen.push(choice);
    }
    let slowest = |share: usize| so_far[total - share].max(last[share]);
    let share = (1..=total)
        .filter(|&share| slowest(share) <= within)
        .min_by(|&a, &b| slowest(a).total_cmp(&slowest(b)))?;
    let mut shares = vec![share];
    let mut sum = total - share;
    for choice in chosen.iter().rev() {
        shares.push(choice[sum]);
        sum -= choice[sum];
    }
    shares.reverse();
    Some((slowest(share), shares)).filter(|(time, _)| time.is_finite())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_follow_speed() {
        let of_speed = |speed: f64| (0..=100).map(|n| f64::from(n) / speed).collect::<Vec<_>>();
        let two = [of_speed(3.0), of_speed(1.0)];
        assert_eq!(least(&two, 100, f64::INFINITY), Some((25.0, vec![75, 25])));
        let three = [of_speed(1.0), of_speed(5.0), of_speed(4.0)];
        assert_eq!(
            least(&three, 100, f64::INFINITY),
            Some((10.0, vec![10, 50, 40]))
        );
        assert_eq!(least(&three, 100, 9.9), None);
    }

    /// Times that rise and fall, against all shares.
    #[test]
    fn the_least_of_all_shares_is_found() {
        let mut seed = 7u64;
        let mut draw = || {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            match seed >> 61 {
                0 => f64::INFINITY,
                _ => (seed >> 40) as f64,
            }
        };
        for total in [1usize, 2, 5, 12] {
            for _ in 0..50 {
                let times: Vec<Vec<f64>> = (0..3)
                    .map(|_| (0..=total).map(|_| draw()).collect())
                    .collect();
                let mut best = f64::INFINITY;
                for a in 1..=total {
                    for b in (1..=total).take_while(|b| a + b < total) {
                        let c = total - a - b;
                        best = best.min(times[0][a].max(times[1][b]).max(times[2][c]));
                    }
                }
                let found = least(&times, total, f64::INFINITY);
                let time = found.as_ref().map_or(f64::INFINITY, |(time, _)| *time);
                assert_eq!(time, best);
                if let Some((_, shares)) = found {
                    assert_eq!(shares.iter().sum::<usize>(), total);
                }
            }
        }
    }
}
