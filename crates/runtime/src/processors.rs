//! The CPU window of a sandbox, and the files in which it reads which processors it has.
//!
//! With a quota alone, a sandbox of one core would see all of the host's processors and start a thread for each. So the
//! workload is started on a window of as many processors as it has cores; windows follow each other around the host by
//! slot, so that sandboxes spread. The files keep the host's numbers: what `sched_getcpu` returns is in the lists, and
//! nothing that a program sizes by the highest number is too small.
//!
//! The window is not a security boundary, and code inside may leave it with `sched_setaffinity`: the quota applies
//! wherever it runs.

use std::collections::HashMap;
use std::fmt::Write as _;
use std::fs;
use std::io;
use std::rc::Rc;

use rustix::thread::CpuSet;

use crate::slot::Slot;

/// File with the processors that are online.
const ONLINE: &str = "/sys/devices/system/cpu/online";
/// Lists of processors in `/sys/devices/system/cpu` that name what the sandbox has.
const LISTS: [&str; 3] = ["online", "possible", "present"];
/// Lists there that are empty, because a sandbox sees no processor that it cannot use.
const EMPTY_LISTS: [&str; 2] = ["offline", "isolated"];

/// The processors of a sandbox.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct View {
    /// Processor numbers of the host, ascending.
    pub(crate) numbers: Vec<u32>,
    /// The files that list the processors; `None` where the host's own files are the same.
    pub(crate) files: Option<ProcessorFiles>,
}

/// What a sandbox reads about its processors.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct ProcessorFiles {
    /// The files of `/sys/devices/system/cpu`: names with the same content, and that content.
    pub(crate) lists: Vec<(Vec<&'static str>, String)>,
    /// The content of `/proc/cpuinfo`.
    pub(crate) info: String,
}

/// Cache of the views that a launcher has created.
#[derive(Debug, Default)]
pub(crate) struct Views(HashMap<Vec<u32>, Rc<View>>);

impl Views {
    /// The processors of the sandbox in `slot` with `cores` cores, or with all of them. Selected from the launcher's
    /// own affinity, which is the platform's: an operator may have narrowed it.
    pub(crate) fn of(&mut self, cores: Option<u32>, slot: Slot) -> io::Result<Rc<View>> {
        let allowed = rustix::thread::sched_getaffinity(None)?;
        let allowed: Vec<u32> = (0..)
            .zip(0..CpuSet::MAX_CPU)
            .filter_map(|(number, index)| allowed.is_set(index).then_some(number))
            .collect();
        self.view(window(&allowed, cores, slot))
    }

    /// The processors with these numbers: those of a sandbox that goes on, whatever slot it has now.
    ///
    /// # Errors
    /// When one of them is not online.
    pub(crate) fn kept(&mut self, numbers: Vec<u32>) -> io::Result<Rc<View>> {
        let online = numbers_of(&fs::read_to_string(ONLINE)?);
        let gone = numbers.iter().find(|number| !online.contains(&(**number as usize)));
        match gone {
            Some(number) => Err(io::Error::other(format!(
                "its processes use processor {number}, and this host does not have that"
            ))),
            None => self.view(numbers),
        }
    }

    fn view(&mut self, numbers: Vec<u32>) -> io::Result<Rc<View>> {
        if let Some(view) = self.0.get(&numbers) {
            return Ok(view.clone());
        }
        let view = Rc::new(View {
            files: files_of(&numbers)?,
            numbers: numbers.clone(),
        });
        self.0.insert(numbers, view.clone());
        Ok(view)
    }
}

/// As many of `allowed` as there are cores, starting after the window of the previous slot.
fn window(allowed: &[u32], cores: Option<u32>, slot: Slot) -> Vec<u32> {
    let count = cores.map_or(allowed.len(), |cores| cores as usize);
    if count >= allowed.len() {
        return allowed.to_vec();
    }
    let first = slot.0 as usize * count % allowed.len();
    let mut numbers: Vec<u32> = allowed.iter().cycle().skip(first).take(count).copied().collect();
    numbers.sort_unstable();
    numbers
}

fn files_of(numbers: &[u32]) -> io::Result<Option<ProcessorFiles>> {
    let list = list_of(numbers);
    if fs::read_to_string(ONLINE)?.trim_end() == list {
        return Ok(None);
    }
    let highest = fs::read_to_string(format!("{}/kernel_max", ONLINE.trim_end_matches("/online")))?;
    let info = fs::read_to_string("/proc/cpuinfo")?;
    Ok(Some(ProcessorFiles {
        lists: vec![
            (LISTS.to_vec(), format!("{list}\n")),
            (EMPTY_LISTS.to_vec(), "\n".to_owned()),
            (vec!["kernel_max"], highest),
        ],
        info: of_processors(&info, numbers),
    }))
}

/// The paragraphs of `/proc/cpuinfo` about these processors.
fn of_processors(info: &str, numbers: &[u32]) -> String {
    let number = |paragraph: &str| -> Option<u32> {
        let line = paragraph.lines().find(|line| line.starts_with("processor"))?;
        line.split_once(':')?.1.trim().parse().ok()
    };
    info.split_inclusive("\n\n")
        .filter(|paragraph| number(paragraph).is_some_and(|number| numbers.contains(&number)))
        .collect()
}

/// Pins the calling process, and its future children, to the processors that its sandbox sees. If all of them have been
/// taken offline since, it runs anywhere.
pub(crate) fn pin_to_window() -> io::Result<()> {
    pin_to(numbers_of(&fs::read_to_string(ONLINE)?).into_iter());
    Ok(())
}

/// Pins the calling process, and its future children, to these processors.
pub(crate) fn pin_to(numbers: impl Iterator<Item = usize>) {
    let mut set = CpuSet::new();
    for number in numbers.filter(|number| *number < CpuSet::MAX_CPU) {
        set.set(number);
    }
    let _ = rustix::thread::sched_setaffinity(None, &set);
}

/// Ascending numbers as the kernel writes them: `0-2,5`.
fn list_of(numbers: &[u32]) -> String {
    let mut text = String::new();
    for run in numbers.chunk_by(|a, b| a + 1 == *b) {
        let comma = if text.is_empty() { "" } else { "," };
        let _ = match run {
            [only] => write!(text, "{comma}{only}"),
            [first, .., last] => write!(text, "{comma}{first}-{last}"),
            [] => Ok(()),
        };
    }
    text
}

/// Parses the output of [`list_of`]. Entries that are not numbers are skipped.
fn numbers_of(list: &str) -> Vec<usize> {
    list.trim()
        .split(',')
        .filter_map(|run| {
            let (first, last) = run.split_once('-').unwrap_or((run, run));
            Some(first.parse().ok()?..=last.parse().ok()?)
        })
        .flatten()
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_follow_each_other_around_the_host() {
        let allowed = [0, 1, 2, 3, 6];
        let of = |cores, slot| window(&allowed, cores, Slot(slot));
        assert_eq!(of(Some(2), 0), [0, 1]);
        assert_eq!(of(Some(2), 1), [2, 3]);
        assert_eq!(of(Some(2), 2), [0, 6]);
        assert_eq!(of(Some(2), 3), [1, 2]);
        for whole in [Some(5), Some(64), None] {
            assert_eq!(of(whole, 3), allowed);
        }
        // Every processor is in as many windows as any other.
        for cores in 1..5 {
            let mut uses = HashMap::new();
            for slot in 0..5 {
                of(Some(cores), slot)
                    .into_iter()
                    .for_each(|number| *uses.entry(number).or_insert(0) += 1);
            }
            assert!(allowed.iter().all(|number| uses[number] == cores), "{cores}: {uses:?}");
        }
    }

    #[test]
    fn lists_are_as_the_kernel_writes_them() {
        for (numbers, list) in [(vec![0], "0"), (vec![0, 1, 2, 5, 7, 8], "0-2,5,7-8"), (vec![], "")] {
            assert_eq!(list_of(&numbers), list);
            let read: Vec<u32> = numbers_of(&format!("{list}\n"))
                .iter()
                .map(|n| u32::try_from(*n).unwrap())
                .collect();
            assert_eq!(read, numbers);
        }
        assert_eq!(numbers_of("x,3-,-,4"), [4]);
    }

    #[test]
    fn paragraphs_are_found_by_their_number() {
        let info = "processor\t: 0\nflags\t\t: fpu\n\nprocessor\t: 1\nflags\t\t: sse\n\nprocessor\t: 11\nx\t: 1\n\n";
        assert_eq!(of_processors(info, &[1]), "processor\t: 1\nflags\t\t: sse\n\n");
        assert_eq!(of_processors(info, &[0, 1, 11]), info);
    }
}
