//! Where the pages are served.

use crate::catalogue::Page;

/// The path below which the pages are served.
pub const BASE: &str = "/docs";

/// The path at which a page is served.
#[must_use]
pub fn address(page: &Page) -> String {
    if page.route == "/" {
        BASE.to_owned()
    } else {
        format!("{BASE}{}", page.route)
    }
}
