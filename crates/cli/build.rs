//! Makes the entry point of the binary the one of `crates/agent/src/spawner/sys.rs`, where there is one, and lays it out for huge
//! pages.

#![expect(
    clippy::disallowed_methods,
    reason = "cargo says in the environment what a binary is built for"
)]

/// Bytes of a huge page.
const HUGE_PAGE: u32 = 2 << 20;

fn main() {
    println!("cargo::rerun-if-changed=build.rs");
    let of = |variable: &str| std::env::var(variable).unwrap_or_default();
    if of("CARGO_CFG_TARGET_ARCH") != "x86_64" || of("CARGO_CFG_TARGET_OS") != "linux" {
        return;
    }
    // A linker only warns of an entry point that does not exist, and begins anywhere; another name for what does not exist is
    // an error.
    for argument in [
        "-Wl,--undefined=ringfence_start",
        "-Wl,--defsym=ringfence_entry=ringfence_start",
        "-Wl,--entry=ringfence_entry",
    ] {
        println!("cargo::rustc-link-arg-bin=ringfence={argument}");
    }
    // Parts of the file that are huge pages in memory are mapped as huge pages, which needs addresses that fit: one fault
    // instead of up to 512, and no page table. The file does not become larger.
    println!("cargo::rustc-link-arg-bin=ringfence=-Wl,-z,max-page-size={HUGE_PAGE}");
}
