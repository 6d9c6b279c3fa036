//! How long the output of a command may be, and how it is cut.

use std::fmt::Write as _;

/// Maximum length of the output, in bytes; a note follows what was cut.
pub const OUTPUT_MAX_BYTES: usize = 64 * 1024;

/// Bounds the output, at the end of a line where there is one.
pub(super) fn cut(mut output: String) -> String {
    if output.len() <= OUTPUT_MAX_BYTES {
        return output;
    }
    let mut end = OUTPUT_MAX_BYTES;
    while !output.is_char_boundary(end) {
        end -= 1;
    }
    let end = output[..end].rfind('\n').map_or(end, |line| line + 1);
    output.truncate(end);
    if !output.ends_with('\n') {
        output.push('\n');
    }
    let _ = writeln!(
        output,
        "[output cut after {end} bytes: name fewer files, or search with rg]"
    );
    output
}
