//! The time of one CPUID instruction: what tells a machine where starting programs is slow from others.
//!
//! The C library executes some eighty of them before a program begins, and in a virtual machine the hypervisor answers each.

/// Instructions in a round, and rounds. The fastest round counts: the others were interrupted.
#[cfg(target_arch = "x86_64")]
const INSTRUCTIONS: u32 = 200;
#[cfg(target_arch = "x86_64")]
const ROUNDS: usize = 5;

/// The time of one instruction, in microseconds; none where there is no such instruction.
#[cfg(target_arch = "x86_64")]
pub(crate) fn cost_us() -> Option<f64> {
    let rounds = (0..ROUNDS).map(|_| {
        let begun = std::time::Instant::now();
        for _ in 0..INSTRUCTIONS {
            std::hint::black_box(std::arch::x86_64::__cpuid(0));
        }
        begun.elapsed() / INSTRUCTIONS
    });
    rounds.min().map(|took| took.as_secs_f64() * 1e6)
}

/// The time of one instruction, in microseconds; none where there is no such instruction.
#[cfg(not(target_arch = "x86_64"))]
pub(crate) fn cost_us() -> Option<f64> {
    None
}

#[cfg(test)]
mod tests {
    #[test]
    fn an_instruction_takes_some_time_and_less_than_a_millisecond() {
        if cfg!(target_arch = "x86_64") {
            let us = super::cost_us().unwrap();
            assert!(us > 0.0 && us < 1000.0, "{us}");
        }
    }
}
