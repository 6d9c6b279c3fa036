//! What goes on in a build, on stderr.

use std::io::{self, IsTerminal as _, Write as _};
use std::time::Instant;

use serde_json::Value;

use crate::output;

/// Columns of a bar.
const BAR: usize = 24;
/// Most bars at the same time.
const BARS_MAX: usize = 16;

/// Lines with the time since the beginning, and on a terminal last lines that change: a bar for each layer that is being
/// downloaded, and the step.
pub(super) struct Progress {
    begun: Instant,
    is_terminal: bool,
    last: String,
    bars: Vec<Bar>,
    /// Number of lines on the terminal that are redrawn.
    drawn: usize,
}

/// A layer of an image that is being downloaded.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Bar {
    layer: String,
    bytes: u64,
    total: u64,
}

impl Bar {
    /// The layers in a line of the log, `downloading layers: 1/5 120 of 3400 bytes, …`; none if it is another line.
    fn all(line: &str) -> Option<Vec<Self>> {
        let layers = line.strip_prefix("downloading layers: ")?;
        let bars: Option<Vec<Self>> = layers.split(", ").map(Self::one).collect();
        bars.filter(|bars| bars.len() <= BARS_MAX)
    }

    fn one(text: &str) -> Option<Self> {
        let words: Vec<&str> = text.split(' ').collect();
        let [layer, bytes, "of", total, "bytes"] = words[..] else {
            return None;
        };
        let is_layer = layer.len() <= 16 && layer.bytes().all(|byte| byte.is_ascii_digit() || byte == b'/');
        let (bytes, total) = (bytes.parse().ok()?, total.parse().ok()?);
        is_layer.then(|| Self {
            layer: layer.to_owned(),
            bytes,
            total,
        })
    }

    fn text(&self) -> String {
        let Self { layer, bytes, total } = self;
        let part = |whole: u128| match total {
            0 => whole,
            total => (u128::from(*bytes).saturating_mul(whole) / u128::from(*total)).min(whole),
        };
        let full = usize::try_from(part(BAR as u128)).unwrap_or(BAR);
        let (done, left) = ("#".repeat(full), "-".repeat(BAR - full));
        #[expect(clippy::cast_precision_loss, reason = "shown with one digit after the point")]
        let mb = |bytes: u64| bytes as f64 / 1e6;
        format!(
            "layer {layer:<7} [{done}{left}] {:>3}% {:.1} of {:.1} MB",
            part(100),
            mb(*bytes),
            mb(*total)
        )
    }
}

impl Progress {
    pub(super) fn new() -> Self {
        Self {
            begun: Instant::now(),
            is_terminal: io::stderr().is_terminal(),
            last: String::new(),
            bars: Vec::new(),
            drawn: 0,
        }
    }

    fn write(text: &str) {
        // If stderr is closed, there is nowhere to report it.
        let mut out = io::stderr().lock();
        let _ = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    }

    fn stamp(&self) -> String {
        format!("{:>7.1}s", self.begun.elapsed().as_secs_f64())
    }

    /// Removes the lines that change.
    pub(super) fn clear(&mut self) {
        if self.drawn > 0 {
            Self::write(&format!("\r\x1b[2K{}", "\x1b[1A\x1b[2K".repeat(self.drawn - 1)));
            self.drawn = 0;
        }
    }

    /// A line that stays. The beginning of a step is also what goes on.
    pub(super) fn line(&mut self, text: &str) {
        self.clear();
        Self::write(&format!("{}  {text}\n", self.stamp()));
        if text.starts_with('[') && !text.contains("[stdout]") && !text.contains("[stderr]") {
            text.clone_into(&mut self.last);
        }
    }

    /// An entry of the log. What only says how far something is becomes bars, and nothing without a terminal.
    pub(super) fn entry(&mut self, entry: &Value) {
        let text = output::printable(entry["message"].as_str().unwrap_or_default());
        match Bar::all(&text) {
            Some(bars) if entry["level"] == "debug" => self.bars = bars,
            _ => {
                self.bars.clear();
                self.line(&text);
            }
        }
    }

    /// What goes on, on a terminal.
    pub(super) fn show(&mut self, state: &str) {
        if !self.is_terminal {
            return;
        }
        self.clear();
        let shown = if self.last.is_empty() { state } else { &self.last };
        let shown: String = shown.chars().take(60).collect();
        let mut text: String = self
            .bars
            .iter()
            .map(|bar| format!("          {}\n", bar.text()))
            .collect();
        text.push_str(&format!("{}  {shown} ...", self.stamp()));
        Self::write(&text);
        self.drawn = self.bars.len() + 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_that_are_downloaded_are_bars() {
        let bars = Bar::all("downloading layers: 1/12 1500000 of 3000000 bytes, 2/12 0 of 0 bytes").unwrap();
        let text: Vec<String> = bars.iter().map(Bar::text).collect();
        assert_eq!(
            text,
            [
                "layer 1/12    [############------------]  50% 1.5 of 3.0 MB",
                "layer 2/12    [########################] 100% 0.0 of 0.0 MB",
            ]
        );
        // More than was announced makes the bar no longer.
        let bar = Bar::one("3/3 18446744073709551615 of 1 bytes").unwrap().text();
        assert!(bar.contains("] 100%"), "{bar}");
        for other in [
            "layer 1/2 unpacked: 7 bytes",
            "downloading layers: ",
            "downloading layers: 1/2 x of 3 bytes",
            "downloading layers: 1/2 1 of 3 bytes, and more",
            "downloading layers: \u{1b}[2J 1 of 3 bytes",
        ] {
            assert_eq!(Bar::all(other), None, "{other}");
        }
    }
}
