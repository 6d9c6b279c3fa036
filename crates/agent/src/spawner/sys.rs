//! Where the program begins when it is the spawner: before the C library is initialised.
//!
//! A spawner is executed for every sandbox, and most never start a process. Nearly all of its time and memory would go to the
//! start of the C library, which executes some eighty CPUID instructions (each a trap to the hypervisor in a virtual machine),
//! resolves its functions and touches about a hundred pages. So `ringfence_start`, which is the entry point of the binary,
//! looks at the arguments first. In every other case than `spawner` it goes on with the C library's `_start` at once.
//!
//! A spawner makes itself safe from the sandbox first, waits for the agent's first request, and only then continues with
//! `_start`, as if it had just been executed. The request stays in the queue of the socket; [`super::run`] does all of this
//! again, which changes nothing, and answers it. So a first command pays for the start of the C library, about half a millisecond,
//! and a sandbox without commands never does.
//!
//! Invariant: until then nothing is used that the C library sets up. That is why this is assembly: a compiler may use
//! thread-local storage, a guard of the stack, or `memcpy`, which is a function that is resolved later. Memory that is used is
//! a few words of the stack that the kernel made. Registers are as the kernel set them when `_start` gets control.
//!
//! `crates/cli/build.rs` names the entry point. Programs of tests have their usual one, and play the spawner with [`super::run`] alone.

#![cfg(target_arch = "x86_64")]
#![expect(unsafe_code, reason = "the entry point of the program")]

use std::arch::global_asm;

use protocol::agent::SPAWNER_FD;

/// `spawner` and the zero byte that ends it, as one word: the argument by which the host starts a spawner.
const ARGUMENT: u64 = u64::from_le_bytes(*b"spawner\0");

// SAFETY: nothing but the kernel gets here, with the stack that the ABI describes for the begin of a process. Of that, only
// words below the stack pointer are written, and all registers that `_start` reads are as they were when it gets control.
global_asm!(
    ".pushsection .text.ringfence_start, \"ax\", @progbits",
    ".globl ringfence_start",
    ".type ringfence_start, @function",
    "ringfence_start:",
    // The kernel's stack: the number of arguments, then pointers to them. Behind the last of all strings are at least eight
    // zero bytes, so eight bytes of each can be read.
    "cmp qword ptr [rsp], 2",
    "jb 9f",
    "mov rax, qword ptr [rsp + 16]",
    "mov rcx, {argument}",
    "cmp qword ptr [rax], rcx",
    "jne 9f",
    // System calls keep all registers but rax, rcx and r11.
    "mov rbx, rsp",
    "mov r12, rdx",
    "sub rsp, 64",
    "and rsp, -16",
    // prctl(PR_SET_DUMPABLE, 0): root inside the sandbox may not trace this, and so neither borrow descriptors.
    "mov eax, {prctl}",
    "mov edi, {set_dumpable}",
    "xor esi, esi",
    "xor edx, edx",
    "xor r10d, r10d",
    "xor r8d, r8d",
    "syscall",
    // setresuid(0, 0, 0): the host starts this with another real user id, so that it is not dumpable from the first moment on.
    "mov eax, {setresuid}",
    "xor edi, edi",
    "xor esi, esi",
    "xor edx, edx",
    "syscall",
    // rt_sigaction(signal, {{SIG_IGN, 0, 0, 0}}, 0, 8) for the signals that `sys::ignore_signals` has, a bit each in r13.
    "mov qword ptr [rsp], 1",
    "mov qword ptr [rsp + 8], 0",
    "mov qword ptr [rsp + 16], 0",
    "mov qword ptr [rsp + 24], 0",
    "mov r13d, {signals}",
    "2:",
    "bsf edi, r13d",
    "jz 3f",
    "btr r13d, edi",
    "mov eax, {sigaction}",
    "mov rsi, rsp",
    "xor edx, edx",
    "mov r10d, 8",
    "syscall",
    "jmp 2b",
    // poll({{SPAWNER_FD, POLLIN}}, 1, -1) until it is anything else than interrupted.
    "3:",
    "mov dword ptr [rsp], {socket}",
    "mov dword ptr [rsp + 4], {pollin}",
    "mov eax, {poll}",
    "mov rdi, rsp",
    "mov esi, 1",
    "mov rdx, -1",
    "syscall",
    "cmp rax, {interrupted}",
    "je 3b",
    "mov rsp, rbx",
    "mov rdx, r12",
    "9:",
    "jmp _start",
    ".size ringfence_start, . - ringfence_start",
    ".popsection",
    argument = const ARGUMENT,
    prctl = const libc::SYS_prctl,
    set_dumpable = const libc::PR_SET_DUMPABLE,
    setresuid = const libc::SYS_setresuid,
    sigaction = const libc::SYS_rt_sigaction,
    signals = const super::IGNORED_BITS,
    socket = const SPAWNER_FD,
    pollin = const libc::POLLIN,
    poll = const libc::SYS_poll,
    interrupted = const -libc::EINTR,
);
