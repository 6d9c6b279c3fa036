//! Offsets into `struct seccomp_data`.

pub(super) const NUMBER: u32 = 0;
pub(super) const ARCH: u32 = 4;

/// Offset of the low half of an argument. The high half is ignored: every argument that is checked is an `int` to
/// the kernel, but for lengths.
pub(super) const fn argument(index: u32) -> u32 {
    16 + index * 8
}

/// Offset of the high half of an argument.
pub(super) const fn high(index: u32) -> u32 {
    argument(index) + 4
}
