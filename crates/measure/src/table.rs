//! Text tables.

/// Rows under a header, in columns as wide as their widest cell.
#[must_use]
pub fn columns(header: &[&str], rows: impl IntoIterator<Item = Vec<String>>) -> String {
    let mut lines: Vec<Vec<String>> = vec![header.iter().map(|&cell| cell.to_owned()).collect()];
    lines.extend(rows);
    let mut widths = vec![0; header.len()];
    for line in &lines {
        for (width, cell) in widths.iter_mut().zip(line) {
            *width = (*width).max(cell.chars().count());
        }
    }
    let mut text = String::new();
    for line in &lines {
        let cells: Vec<String> = line
            .iter()
            .zip(&widths)
            .map(|(cell, &width)| format!("{cell:width$}"))
            .collect();
        text.push_str(cells.join("  ").trim_end());
        text.push('\n');
    }
    text
}
