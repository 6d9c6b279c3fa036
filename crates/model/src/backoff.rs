//! How long to wait before something that has failed is tried again.

use std::time::Duration;

/// The longest pause.
const LONGEST: Duration = Duration::from_secs(60);

/// The pause after something has failed this often in a row: a second, and twice as long each time, up to a minute.
#[must_use]
pub fn pause(failures: u32) -> Duration {
    match failures {
        0 => Duration::ZERO,
        1..=6 => Duration::from_secs(1 << (failures - 1)),
        7.. => LONGEST,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_up_to_a_minute() {
        let seconds: Vec<u64> = (0..10).map(|failures| pause(failures).as_secs()).collect();
        assert_eq!(seconds, [0, 1, 2, 4, 8, 16, 32, 60, 60, 60]);
        assert_eq!(pause(u32::MAX), LONGEST);
    }
}
