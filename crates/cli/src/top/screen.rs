//! The view on a terminal: what is shown, and what keys do.

use std::io::{self, Write as _};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::{Context as _, Result};
use server::operator::OperatorSandbox;
use tokio::signal::unix::{SignalKind, signal};
use tokio::time::MissedTickBehavior;

use super::look::look;
use super::rows;
use crate::args::{TopArgs, TopOrder};
use crate::data_dir::DataDir;
use crate::signals::AllSignals;
use crate::terminal::Raw;
use crate::{clock, output, stdio, terminal};

/// Begins the view: the alternate screen, without a cursor.
const BEGIN: &[u8] = b"\x1b[?1049h\x1b[?25l";
/// Ends the view: the cursor and the screen from before.
const END: &[u8] = b"\x1b[0m\x1b[?25h\x1b[?1049l";
/// Lines that are no rows: summary, state, header and keys.
const LINES: usize = 4;
/// Widths of the columns but the last two, which share what is left.
const WIDTHS: [usize; 8] = [21, 8, 6, 9, 9, 9, 9, 7];
/// Narrower screens show no network.
const WIDE: usize = 100;
const KEYS: &str = "q quit  c cpu  m memory  d disk  n network  a age  s state  i template  t team  r reverse";

/// The alternate screen in raw mode, until this is dropped.
struct Screen(Raw);

impl Screen {
    fn begin() -> Result<Self> {
        let screen = Self(Raw::enter()?);
        screen.write(BEGIN)?;
        Ok(screen)
    }

    fn write(&self, bytes: &[u8]) -> Result<()> {
        let mut out = io::stdout().lock();
        out.write_all(bytes)
            .and_then(|()| out.flush())
            .context("write to the terminal")
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        let _ = self.write(END);
    }
}

/// What is shown.
struct View {
    sandboxes: Vec<OperatorSandbox>,
    order: TopOrder,
    is_reversed: bool,
    /// The first row that is shown.
    first: usize,
    /// Why there is nothing newer, if the platform does not answer.
    error: Option<String>,
}

/// What a key asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Key {
    Quit,
    Order(TopOrder),
    Reverse,
    Up,
    Down,
    PageUp,
    PageDown,
    Home,
    End,
}

/// Shows the sandboxes until a key or a signal ends it.
pub(super) async fn run(dir: &DataDir, args: &TopArgs) -> Result<ExitCode> {
    let mut view = View {
        sandboxes: look(dir, args).await?,
        order: args.sort,
        is_reversed: false,
        first: 0,
        error: None,
    };
    let mut signals = AllSignals::listen()?;
    let mut resized = signal(SignalKind::window_change()).context("listen for SIGWINCH")?;
    let mut continued =
        signal(SignalKind::from_raw(rustix::process::Signal::CONT.as_raw())).context("listen for SIGCONT")?;
    let mut ticks = tokio::time::interval(Duration::from_secs(u64::from(args.interval)));
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks.tick().await;
    let screen = Screen::begin()?;
    let mut keys = stdio::read_stdin()?;
    loop {
        let (columns, lines) = terminal::size();
        let drawn = view.draw(usize::from(columns), usize::from(lines), clock::now_us());
        screen.write(drawn.as_bytes())?;
        tokio::select! {
            _ = ticks.tick() => match look(dir, args).await {
                Ok(sandboxes) => {
                    view.sandboxes = sandboxes;
                    view.error = None;
                }
                Err(error) => view.error = Some(output::printable(&format!("{error:#}"))),
            },
            typed = keys.recv() => {
                // A terminal that is gone sends nothing any more.
                let Some(typed) = typed else { return Ok(ExitCode::SUCCESS) };
                for key in pressed(&typed) {
                    if key == Key::Quit {
                        return Ok(ExitCode::SUCCESS);
                    }
                    view.press(key, usize::from(lines).saturating_sub(LINES));
                }
            }
            _ = resized.recv() => {}
            _ = continued.recv() => {
                screen.0.again()?;
                screen.write(BEGIN)?;
            }
            signal = signals.next() => return Ok(signal.exit_code()),
        }
    }
}

/// The keys in what was typed.
fn pressed(typed: &[u8]) -> Vec<Key> {
    const SEQUENCES: [(&[u8], Key); 10] = [
        (b"\x1b[A", Key::Up),
        (b"\x1b[B", Key::Down),
        (b"\x1b[5~", Key::PageUp),
        (b"\x1b[6~", Key::PageDown),
        (b"\x1b[H", Key::Home),
        (b"\x1b[F", Key::End),
        (b"\x1b[1~", Key::Home),
        (b"\x1b[4~", Key::End),
        (b"\x1bOA", Key::Up),
        (b"\x1bOB", Key::Down),
    ];
    let mut keys = Vec::new();
    let mut rest = typed;
    while let Some((first, others)) = rest.split_first() {
        if let Some((sequence, key)) = SEQUENCES.iter().find(|(sequence, _)| rest.starts_with(sequence)) {
            keys.push(*key);
            rest = &rest[sequence.len()..];
            continue;
        }
        rest = others;
        keys.push(match first {
            b'q' | b'Q' | 3 | 4 => Key::Quit,
            b'c' => Key::Order(TopOrder::Cpu),
            b'm' => Key::Order(TopOrder::Memory),
            b'd' => Key::Order(TopOrder::Disk),
            b'n' => Key::Order(TopOrder::Network),
            b'a' => Key::Order(TopOrder::Age),
            b's' => Key::Order(TopOrder::State),
            b'i' => Key::Order(TopOrder::Template),
            b't' => Key::Order(TopOrder::Team),
            b'r' => Key::Reverse,
            b'k' => Key::Up,
            b'j' => Key::Down,
            b' ' => Key::PageDown,
            // A sequence of another key: none of its characters is one.
            0x1b => return keys,
            _ => continue,
        });
    }
    keys
}

impl View {
    fn press(&mut self, key: Key, page: usize) {
        let page = page.max(1);
        match key {
            Key::Quit => {}
            Key::Order(order) => {
                self.order = order;
                self.is_reversed = false;
                self.first = 0;
            }
            Key::Reverse => self.is_reversed = !self.is_reversed,
            Key::Up => self.first = self.first.saturating_sub(1),
            Key::Down => self.first += 1,
            Key::PageUp => self.first = self.first.saturating_sub(page),
            Key::PageDown => self.first += page,
            Key::Home => self.first = 0,
            Key::End => self.first = self.sandboxes.len(),
        }
        self.first = self.first.min(self.sandboxes.len().saturating_sub(page));
    }

    /// The whole screen.
    fn draw(&mut self, columns: usize, lines: usize, now_us: i64) -> String {
        rows::sort(&mut self.sandboxes, self.order, self.is_reversed);
        let page = lines.saturating_sub(LINES);
        self.first = self.first.min(self.sandboxes.len().saturating_sub(page.max(1)));
        let shown = self.sandboxes.iter().skip(self.first).take(page);
        let last = (self.first + page).min(self.sandboxes.len());
        let mut all = vec![
            rows::summary(&self.sandboxes),
            match &self.error {
                Some(error) => format!("not updated: {error}"),
                None if self.sandboxes.is_empty() => "no sandboxes".to_owned(),
                None => format!("rows {} to {last}", self.first + 1),
            },
        ];
        let header: Vec<String> = rows::HEADER.iter().map(|&cell| cell.to_owned()).collect();
        all.push(row(&header, columns));
        all.extend(shown.map(|sandbox| row(&rows::cells(sandbox, now_us), columns)));
        all.resize(lines.saturating_sub(1).max(1), String::new());
        all.push(KEYS.to_owned());
        all.truncate(lines);
        let drawn = all.iter().enumerate().map(|(number, line)| {
            let line = cut(line, columns);
            match number {
                2 => format!("\x1b[7m{line:columns$}\x1b[0m"),
                _ => line,
            }
        });
        // No line end after the last line, which would scroll.
        format!("\x1b[H{}\x1b[J", drawn.collect::<Vec<_>>().join("\x1b[K\r\n"))
    }
}

/// A row: numbers to the right, names to the left, cut to their columns.
fn row(cells: &[String], columns: usize) -> String {
    let is_shown = |number: usize| columns >= WIDE || !rows::NETWORK.contains(&number);
    let fixed: usize = (0..WIDTHS.len())
        .filter(|&at| is_shown(at))
        .map(|at| WIDTHS[at] + 1)
        .sum();
    let rest = columns.saturating_sub(fixed + 1) / 2;
    let mut line = String::new();
    for (number, cell) in cells.iter().enumerate().filter(|(number, _)| is_shown(*number)) {
        let width = WIDTHS.get(number).copied().unwrap_or(rest);
        let cell = cut(cell, width);
        if (2..WIDTHS.len()).contains(&number) {
            line.push_str(&format!("{cell:>width$} "));
        } else {
            line.push_str(&format!("{cell:width$} "));
        }
    }
    line.trim_end().to_owned()
}

fn cut(text: &str, width: usize) -> String {
    text.chars().take(width).collect()
}

#[cfg(test)]
mod tests {
    use super::super::rows::tests::sandbox;
    use super::*;

    fn view(count: usize) -> View {
        View {
            sandboxes: (0..count)
                .map(|number| sandbox(&format!("i{number:05}"), "t\u{1b}[2Jx", Some((1.0, 1 << 20))))
                .collect(),
            order: TopOrder::Cpu,
            is_reversed: false,
            first: 0,
            error: None,
        }
    }

    #[test]
    fn ten_thousand_rows_fit_a_small_screen() {
        let mut view = view(10_000);
        for (columns, lines) in [(80, 24), (40, 5), (300, 100), (1, 1), (10, 3)] {
            let drawn = view.draw(columns, lines, 0);
            assert!(!drawn.contains("\u{1b}[2J"), "{drawn}");
            let plain = drawn.replace("\x1b[H", "").replace("\x1b[K", "").replace("\x1b[J", "");
            let plain = plain.replace("\x1b[7m", "").replace("\x1b[0m", "");
            let all: Vec<&str> = plain.split("\r\n").collect();
            assert!(all.len() <= lines, "{} lines of {lines}", all.len());
            assert!(all.iter().all(|line| line.chars().count() <= columns), "{plain}");
        }
    }

    #[test]
    fn only_wide_screens_show_the_network() {
        let mut view = view(1);
        let wide = view.draw(WIDE, 10, 0);
        assert!(wide.contains("RECEIVED") && wide.contains("3.0 MiB"), "{wide}");
        let narrow = view.draw(80, 10, 0);
        assert!(!narrow.contains("RECEIVED") && narrow.contains("TEAM"), "{narrow}");
    }

    #[test]
    fn keys_sort_and_scroll_within_the_rows() {
        let mut view = view(100);
        for (typed, first) in [
            (&b"\x1b[B"[..], 1),
            (&b"\x1b[6~"[..], 21),
            (&b"\x1b[F"[..], 80),
            (&b"jjj"[..], 80),
            (&b"\x1b[5~"[..], 60),
            (&b"\x1b[H"[..], 0),
            (&b"k"[..], 0),
            (&b"\x1b[99~"[..], 0),
        ] {
            for key in pressed(typed) {
                view.press(key, 20);
            }
            assert_eq!(view.first, first, "{typed:?}");
        }
        assert_eq!(
            pressed(b"tr\x03"),
            [Key::Order(TopOrder::Team), Key::Reverse, Key::Quit]
        );
    }
}
