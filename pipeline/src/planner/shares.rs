//! Shares in proportion to speed, in whole parts and under limits.

/// Weights inverse to times; equal ones where nothing takes time. What takes less than a millionth of the longest counts as a millionth, so
/// that weights stay finite.
pub(super) fn inverse(times: &[f64]) -> Vec<f64> {
    let longest = times.iter().copied().fold(0.0, f64::max);
    match longest > 0.0 {
        true => times.iter().map(|t| longest / t.max(1e-6 * longest)).collect(),
        false => vec![1.0; times.len()],
    }
}

/// `total` in whole parts proportional to `weights`, by largest remainder; of equal remainders the first gets the part.
pub(super) fn whole(total: u32, weights: &[f64]) -> Vec<u32> {
    let sum: f64 = weights.iter().sum();
    let exact: Vec<f64> = weights.iter().map(|w| f64::from(total) * w / sum).collect();
    let mut parts: Vec<u32> = exact.iter().map(|e| e.floor() as u32).collect();
    let mut order: Vec<usize> = (0..parts.len()).collect();
    order.sort_by(|a, b| exact[*b].fract().total_cmp(&exact[*a].fract()));
    let left = total.saturating_sub(parts.iter().sum()) as usize;
    order.into_iter().cycle().take(left).for_each(|i| parts[i] += 1);
    parts
}

/// As [`whole`], none above its limit: what is beyond goes to the others in the same way. `None` where all limits together are below `total`.
pub(super) fn whole_within(total: u32, weights: &[f64], most: &[u32]) -> Option<Vec<u32>> {
    let mut parts = vec![0; weights.len()];
    let mut left = total;
    while left > 0 {
        let open: Vec<usize> = (0..parts.len()).filter(|i| parts[*i] < most[*i]).collect();
        if open.is_empty() {
            return None;
        }
        let more = whole(left, &open.iter().map(|i| weights[*i]).collect::<Vec<_>>());
        for (i, more) in open.into_iter().zip(more) {
            let taken = more.min(most[i] - parts[i]);
            parts[i] += taken;
            left -= taken;
        }
    }
    Some(parts)
}
