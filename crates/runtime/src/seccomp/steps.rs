//! The steps that the filter consists of, and how they are found by a number.

use std::collections::BTreeMap;

use libc::sock_filter;

/// Result of the filter for a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Answer {
    Allow,
    Errno(i32),
}

impl Answer {
    pub(super) fn code(self) -> u32 {
        match self {
            Self::Allow => libc::SECCOMP_RET_ALLOW,
            Self::Errno(errno) => libc::SECCOMP_RET_ERRNO | (errno.cast_unsigned() & libc::SECCOMP_RET_DATA),
        }
    }
}

/// One instruction, or a jump target.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Step {
    /// Loads a word of the call's data into the accumulator.
    Load(u32),
    /// Continues when the accumulator equals the value, otherwise skips `n` steps.
    IfEqualElseSkip(u32, u8),
    /// Skips `n` steps when the accumulator equals the value.
    SkipIfEqual(u32, u8),
    /// Continues when the accumulator is at least the value, otherwise skips `n` steps.
    IfAtLeastElseSkip(u32, u8),
    /// Skips `n` steps when the accumulator is at least the value.
    SkipIfAtLeast(u32, u8),
    /// Continues when the accumulator shares a bit with the value, otherwise skips `n` steps.
    IfAnyBitElseSkip(u32, u8),
    /// Skips `n` steps when the accumulator shares a bit with the value.
    SkipIfAnyBit(u32, u8),
    /// Skips `n` steps.
    Skip(u32),
    /// Keeps only these bits of the accumulator.
    Mask(u32),
    /// Ends the filter.
    Return(Answer),
}

impl Step {
    pub(super) fn instruction(self) -> sock_filter {
        let jump = |code: u32, k: u32, jt: u8, jf: u8| filter(libc::BPF_JMP | code | libc::BPF_K, jt, jf, k);
        match self {
            Self::Load(offset) => filter(libc::BPF_LD | libc::BPF_W | libc::BPF_ABS, 0, 0, offset),
            Self::IfEqualElseSkip(value, n) => jump(libc::BPF_JEQ, value, 0, n),
            Self::SkipIfEqual(value, n) => jump(libc::BPF_JEQ, value, n, 0),
            Self::IfAtLeastElseSkip(value, n) => jump(libc::BPF_JGE, value, 0, n),
            Self::SkipIfAtLeast(value, n) => jump(libc::BPF_JGE, value, n, 0),
            Self::IfAnyBitElseSkip(value, n) => jump(libc::BPF_JSET, value, 0, n),
            Self::SkipIfAnyBit(value, n) => jump(libc::BPF_JSET, value, n, 0),
            Self::Skip(n) => filter(libc::BPF_JMP | libc::BPF_JA, 0, 0, n),
            Self::Mask(bits) => filter(libc::BPF_ALU | libc::BPF_AND | libc::BPF_K, 0, 0, bits),
            Self::Return(answer) => filter(libc::BPF_RET | libc::BPF_K, 0, 0, answer.code()),
        }
    }
}

fn filter(code: u32, jt: u8, jf: u8, k: u32) -> sock_filter {
    sock_filter {
        code: u16::try_from(code).unwrap_or(0),
        jt,
        jf,
        k,
    }
}

/// The ranges of all values, each with its first value and what follows: `checks` for those in it, `otherwise` for the
/// rest.
pub(super) fn cover(checks: BTreeMap<u32, Vec<Step>>, otherwise: &[Step]) -> Vec<(u32, Vec<Step>)> {
    let mut ranges: Vec<(u32, Vec<Step>)> = Vec::new();
    let mut add = |first, then: Vec<Step>| {
        if ranges.last().is_none_or(|(_, before)| *before != then) {
            ranges.push((first, then));
        }
    };
    let mut next = Some(0);
    for (value, then) in checks {
        if let Some(first) = next.filter(|first| *first < value) {
            add(first, otherwise.to_vec());
        }
        add(value, then);
        next = value.checked_add(1);
    }
    if let Some(first) = next {
        add(first, otherwise.to_vec());
    }
    ranges
}

/// Binary search for the range of a call's number, followed by its steps. The kernel runs the filter once for each
/// existing call when it is installed, which happens twice for a sandbox, so a linear search would cost each start a
/// quarter of a millisecond.
pub(super) fn decide(ranges: &[(u32, Vec<Step>)]) -> Vec<Step> {
    let (below, from) = ranges.split_at(ranges.len() / 2);
    let Some((first, then)) = from.first() else {
        return Vec::new();
    };
    if below.is_empty() {
        return then.clone();
    }
    let (below, from) = (decide(below), decide(from));
    let mut steps = match u8::try_from(below.len()) {
        Ok(near) => vec![Step::SkipIfAtLeast(*first, near)],
        Err(_) => vec![
            Step::IfAtLeastElseSkip(*first, 1),
            Step::Skip(u32::try_from(below.len()).unwrap_or(u32::MAX)),
        ],
    };
    steps.extend(below);
    steps.extend(from);
    steps
}
