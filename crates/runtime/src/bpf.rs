//! Programs that the platform loads into the kernel.

pub(crate) mod sys;

/// Opcodes.
pub(crate) mod op {
    /// `dst = *(u32 *)(src + offset)`
    pub(crate) const LOAD: u8 = 0x61;
    /// `*(u32 *)(dst + offset) = src`
    pub(crate) const STORE: u8 = 0x63;
    /// `*(u64 *)(dst + offset) = src`
    pub(crate) const STORE_LONG: u8 = 0x7b;
    /// `*(u64 *)(dst + offset) += src`, atomically
    pub(crate) const ADD_ATOMIC: u8 = 0xdb;
    /// `dst = immediate`
    pub(crate) const MOVE: u8 = 0xb7;
    /// `dst = src`
    pub(crate) const COPY: u8 = 0xbf;
    pub(crate) const ADD: u8 = 0x07;
    pub(crate) const AND: u8 = 0x57;
    pub(crate) const OR_REGISTER: u8 = 0x4f;
    pub(crate) const JUMP: u8 = 0x05;
    pub(crate) const IF_EQUAL: u8 = 0x15;
    pub(crate) const IF_NOT_EQUAL: u8 = 0x55;
    /// `dst` = the map with this descriptor. Takes two instructions.
    pub(crate) const LOAD_MAP: u8 = 0x18;
    pub(crate) const CALL: u8 = 0x85;
    pub(crate) const EXIT: u8 = 0x95;
}

/// An instruction: opcode, destination and source register, offset, immediate value.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Instruction(
    pub(crate) u8,
    pub(crate) u8,
    pub(crate) u8,
    pub(crate) i16,
    pub(crate) i32,
);

/// Adds an instruction to a program.
pub(crate) fn push(program: &mut Vec<u64>, instruction: Instruction) {
    let Instruction(opcode, dst, src, offset, immediate) = instruction;
    let [offset_low, offset_high] = offset.to_ne_bytes();
    let [a, b, c, d] = immediate.to_ne_bytes();
    let bytes = [opcode, src << 4 | dst, offset_low, offset_high, a, b, c, d];
    program.push(u64::from_ne_bytes(bytes));
    if opcode == op::LOAD_MAP {
        program.push(0);
    }
}
