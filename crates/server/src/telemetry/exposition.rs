//! Metrics in the text format of Prometheus become messages of OTLP, by the rules that OpenTelemetry has for both formats.
//!
//! The library of the metrics writes that text, and has no other view of its registry that could be had without a compiler of
//! protobuf. Names stay as they are at `/metrics`, so that alerts and dashboards find the same series, whichever way they took.
//! Only what this program writes is read: anything unknown is an error, which a test would find first.

use std::collections::HashMap;

use super::message::{
    AnyValue, Data, Gauge, Histogram, HistogramPoint, KeyValue, Metric, Number, NumberPoint, OneValue, Sum,
};

/// `AggregationTemporality` of values since the start.
const CUMULATIVE: i32 = 2;
/// `DataPointFlags` of a series that has no value now, where the text has NaN.
const NO_VALUE: u32 = 1;
/// The label of histograms that has the bound of a bucket.
const BOUND: &str = "le";

/// A line that is not understood.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("line {0} of the metrics is not understood")]
pub(super) struct Unreadable(usize);

/// Converts one text after the other, and knows since when each series counts.
#[derive(Debug)]
pub(super) struct Converter {
    /// When the metrics began to count.
    begun_ns: u64,
    /// When the text before was written.
    before_ns: u64,
    /// What counts, by its name with its labels. Those have few values, all of this program.
    counting: HashMap<Box<str>, Counting>,
}

/// A series that counts.
#[derive(Debug, Clone, Copy)]
struct Counting {
    start_ns: u64,
    last: f64,
}

impl Converter {
    /// A converter of metrics that began to count at that time after 1970.
    pub(super) fn new(begun_ns: u64) -> Self {
        Self {
            begun_ns,
            before_ns: begun_ns,
            counting: HashMap::new(),
        }
    }

    /// Converts a text that was written at that time.
    ///
    /// # Errors
    /// When a line is not understood.
    pub(super) fn convert(&mut self, text: &str, now_ns: u64) -> Result<Vec<Metric>, Unreadable> {
        let mut metrics = Vec::new();
        let mut family = Family::default();
        for (index, line) in text.lines().enumerate() {
            let read = self.line(line, now_ns, &mut family, &mut metrics);
            read.ok_or(Unreadable(index + 1))?;
        }
        metrics.extend(family.finish());
        self.before_ns = now_ns;
        Ok(metrics)
    }

    fn line<'a>(
        &mut self,
        line: &'a str,
        now_ns: u64,
        family: &mut Family<'a>,
        metrics: &mut Vec<Metric>,
    ) -> Option<()> {
        let Some(comment) = line.strip_prefix("# ") else {
            let sample = Sample::read(line)?;
            return self.sample(sample, now_ns, family);
        };
        let Some((what, rest)) = comment.split_once(' ') else {
            return (comment == "EOF").then_some(());
        };
        let (name, value) = rest.split_once(' ')?;
        if family.name != name {
            metrics.extend(std::mem::take(family).finish());
            family.name = name;
        }
        match what {
            "HELP" => family.help = value,
            "UNIT" => family.unit = unit(value),
            "TYPE" => family.kind = Some(Kind::read(value)?),
            _ => return None,
        }
        Some(())
    }

    fn sample<'a>(&mut self, sample: Sample<'a>, now_ns: u64, family: &mut Family<'a>) -> Option<()> {
        let kind = family.kind?;
        let suffix = sample.name.strip_prefix(family.name)?;
        match (kind, suffix) {
            (Kind::Gauge, "") | (Kind::Info, "_info") | (Kind::Counter, "_total") => {
                let (value, flags) = number(sample.value)?;
                let start_time_unix_nano = if kind == Kind::Counter {
                    self.since(sample.series, sample.value.parse().ok()?, now_ns)
                } else {
                    0
                };
                family.sample_name = sample.name;
                family.numbers.push(NumberPoint {
                    start_time_unix_nano,
                    time_unix_nano: now_ns,
                    attributes: attributes(sample.labels),
                    flags,
                    value,
                });
            }
            (Kind::Histogram, "_sum" | "_count" | "_bucket") => {
                let mut labels = sample.labels;
                let bound = labels.iter().position(|(name, _)| *name == BOUND);
                let bound = bound.map(|at| labels.remove(at).1);
                let attributes = attributes(labels);
                if family
                    .histograms
                    .last()
                    .is_none_or(|last| last.attributes != attributes)
                {
                    family.histograms.push(HistogramPoint {
                        time_unix_nano: now_ns,
                        attributes,
                        ..HistogramPoint::default()
                    });
                }
                family.sample_name = family.name;
                let point = family.histograms.last_mut()?;
                match (suffix, bound) {
                    ("_sum", None) => point.sum = Some(sample.value.parse().ok()?),
                    ("_count", None) => {
                        point.count = sample.value.parse().ok()?;
                        point.start_time_unix_nano = self.since(sample.series, sample.value.parse().ok()?, now_ns);
                    }
                    ("_bucket", Some(bound)) => {
                        // The text counts what is below the bound, the message what is between two.
                        let below: u64 = sample.value.parse().ok()?;
                        let so_far: u64 = point.bucket_counts.iter().sum();
                        point.bucket_counts.push(below.checked_sub(so_far)?);
                        let bound: f64 = bound.parse().ok()?;
                        if bound.is_finite() {
                            point.explicit_bounds.push(bound);
                        }
                    }
                    _ => return None,
                }
            }
            _ => return None,
        }
        Some(())
    }

    /// Since when a series counts. One that has less than before began anew in between: it was that of a node which was
    /// started again, or has gone.
    fn since(&mut self, series: &str, value: f64, now_ns: u64) -> u64 {
        let Some(counting) = self.counting.get_mut(series) else {
            let counting = Counting {
                start_ns: self.begun_ns.min(now_ns),
                last: value,
            };
            self.counting.insert(series.into(), counting);
            return counting.start_ns;
        };
        if value < counting.last {
            counting.start_ns = self.before_ns.min(now_ns);
        }
        counting.last = value;
        counting.start_ns
    }
}

/// The kind of a metric.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Counter,
    Gauge,
    Histogram,
    Info,
}

impl Kind {
    fn read(text: &str) -> Option<Self> {
        match text {
            "counter" => Some(Self::Counter),
            "gauge" => Some(Self::Gauge),
            "histogram" => Some(Self::Histogram),
            "info" => Some(Self::Info),
            _ => None,
        }
    }
}

/// A metric of which lines are being read.
#[derive(Debug, Default)]
struct Family<'a> {
    name: &'a str,
    help: &'a str,
    unit: &'static str,
    kind: Option<Kind>,
    /// The name of its series.
    sample_name: &'a str,
    numbers: Vec<NumberPoint>,
    histograms: Vec<HistogramPoint>,
}

impl Family<'_> {
    /// The metric; none if it has no series yet.
    fn finish(self) -> Option<Metric> {
        let data = match self.kind? {
            Kind::Histogram if self.histograms.is_empty() => return None,
            Kind::Histogram => Data::Histogram(Histogram {
                data_points: self.histograms,
                aggregation_temporality: CUMULATIVE,
            }),
            _ if self.numbers.is_empty() => return None,
            Kind::Counter => Data::Sum(Sum {
                data_points: self.numbers,
                aggregation_temporality: CUMULATIVE,
                is_monotonic: true,
            }),
            Kind::Gauge | Kind::Info => Data::Gauge(Gauge {
                data_points: self.numbers,
            }),
        };
        Some(Metric {
            name: self.sample_name.to_owned(),
            description: self.help.to_owned(),
            unit: self.unit.to_owned(),
            data: Some(data),
        })
    }
}

/// A line with a value.
struct Sample<'a> {
    name: &'a str,
    /// The name with the labels, by which the series is known.
    series: &'a str,
    labels: Vec<(&'a str, String)>,
    value: &'a str,
}

impl<'a> Sample<'a> {
    fn read(line: &'a str) -> Option<Self> {
        // A value has no space, and a label may have some.
        let (series, value) = line.rsplit_once(' ')?;
        let (name, labels) = match series.split_once('{') {
            Some((name, labels)) => (name, read_labels(labels.strip_suffix('}')?)?),
            None => (series, Vec::new()),
        };
        Some(Self {
            name,
            series,
            labels,
            value,
        })
    }
}

fn read_labels(mut text: &str) -> Option<Vec<(&str, String)>> {
    let mut labels = Vec::new();
    while !text.is_empty() {
        let (name, rest) = text.split_once("=\"")?;
        let mut value = String::new();
        let mut characters = rest.char_indices();
        let end = loop {
            match characters.next()? {
                (at, '"') => break at,
                (_, '\\') => value.push(match characters.next()?.1 {
                    'n' => '\n',
                    other => other,
                }),
                (_, other) => value.push(other),
            }
        };
        labels.push((name, value));
        let rest = &rest[end + 1..];
        text = match rest.strip_prefix(',') {
            Some(next) => next,
            None if rest.is_empty() => rest,
            None => return None,
        };
    }
    Some(labels)
}

fn attributes(labels: Vec<(&str, String)>) -> Vec<KeyValue> {
    let labels = labels.into_iter();
    let pair = |(key, value): (&str, String)| KeyValue {
        key: key.to_owned(),
        value: Some(AnyValue {
            value: Some(OneValue::Text(value)),
        }),
    };
    labels.map(pair).collect()
}

/// A value, and the flags of its point.
fn number(text: &str) -> Option<(Option<Number>, u32)> {
    if let Ok(whole) = text.parse() {
        return Some((Some(Number::Int(whole)), 0));
    }
    let value: f64 = text.parse().ok()?;
    Some(if value.is_nan() {
        (None, NO_VALUE)
    } else {
        (Some(Number::Double(value)), 0)
    })
}

/// A unit as OpenTelemetry writes it. Names have the unit of Prometheus as well.
fn unit(text: &str) -> &'static str {
    match text {
        "seconds" => "s",
        "bytes" => "By",
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use protocol::node::Stage;

    use super::*;
    use crate::metrics::{ConnectionCounts, CopyCounts, Metrics, MetricsSnapshot};
    use crate::settings::CapacitySettings;

    const TEXT: &str = r#"# HELP a_creates Create requests, by outcome.
# TYPE a_creates counter
a_creates_total{outcome="created"} 7
a_creates_total{outcome="a \"b\", {c}\\d\n"} 0
# HELP a_left_bytes Memory; NaN if unknown.
# TYPE a_left_bytes gauge
# UNIT a_left_bytes bytes
a_left_bytes NaN
# HELP a_max Bound.
# TYPE a_max gauge
a_max inf
# HELP a_none Nothing yet.
# TYPE a_none counter
# HELP a_took_seconds Durations.
# TYPE a_took_seconds histogram
# UNIT a_took_seconds seconds
a_took_seconds_sum{stage="x"} 3.5
a_took_seconds_count{stage="x"} 6
a_took_seconds_bucket{le="0.5",stage="x"} 1
a_took_seconds_bucket{le="1.0",stage="x"} 4
a_took_seconds_bucket{le="+Inf",stage="x"} 6
a_took_seconds_sum{stage="y"} 0.0
a_took_seconds_count{stage="y"} 0
a_took_seconds_bucket{le="0.5",stage="y"} 0
a_took_seconds_bucket{le="1.0",stage="y"} 0
a_took_seconds_bucket{le="+Inf",stage="y"} 0
# HELP a_build Version.
# TYPE a_build info
a_build_info{version="1"} 1
# EOF
"#;

    fn snapshot() -> MetricsSnapshot {
        MetricsSnapshot {
            sandboxes: vec![("running", 1)],
            paused_disk_bytes: 7,
            copies: CopyCounts::default(),
            pooled: [("ready", 1), ("starting", 0)],
            connections: 1,
            clients: ConnectionCounts::default(),
            log_entries_lost: 0,
            capacity: None,
            egress: None,
            certificate: None,
        }
    }

    fn of(metrics: &[Metric], name: &str) -> Metric {
        metrics.iter().find(|metric| metric.name == name).unwrap().clone()
    }

    fn text_of(attributes: &[KeyValue]) -> Vec<(String, String)> {
        let attributes = attributes.iter();
        attributes
            .map(|pair| match pair.value.clone().unwrap().value {
                Some(OneValue::Text(text)) => (pair.key.clone(), text),
                other => panic!("{other:?}"),
            })
            .collect()
    }

    #[test]
    fn each_kind_becomes_what_opentelemetry_has_for_it() {
        let metrics = Converter::new(100).convert(TEXT, 200).unwrap();
        let names: Vec<_> = metrics.iter().map(|metric| metric.name.as_str()).collect();
        assert_eq!(
            names,
            [
                "a_creates_total",
                "a_left_bytes",
                "a_max",
                "a_took_seconds",
                "a_build_info"
            ]
        );
        let creates = of(&metrics, "a_creates_total");
        assert_eq!(creates.description, "Create requests, by outcome.");
        let Some(Data::Sum(sum)) = creates.data else { panic!() };
        assert!(sum.is_monotonic && sum.aggregation_temporality == CUMULATIVE);
        let [created, other] = &sum.data_points[..] else {
            panic!()
        };
        assert_eq!((created.start_time_unix_nano, created.time_unix_nano), (100, 200));
        assert_eq!(created.value, Some(Number::Int(7)));
        assert_eq!(text_of(&created.attributes), [("outcome".into(), "created".into())]);
        assert_eq!(
            text_of(&other.attributes),
            [("outcome".into(), "a \"b\", {c}\\d\n".into())]
        );
        let left = of(&metrics, "a_left_bytes");
        assert_eq!(left.unit, "By");
        let Some(Data::Gauge(gauge)) = left.data else { panic!() };
        assert_eq!(
            (gauge.data_points[0].value, gauge.data_points[0].flags),
            (None, NO_VALUE)
        );
        assert_eq!(
            gauge.data_points[0].start_time_unix_nano, 0,
            "a current value has no start"
        );
        let Some(Data::Gauge(gauge)) = of(&metrics, "a_max").data else {
            panic!()
        };
        assert_eq!(gauge.data_points[0].value, Some(Number::Double(f64::INFINITY)));
    }

    #[test]
    fn all_metrics_of_the_platform_are_understood() {
        let metrics = Metrics::new(&CapacitySettings::default());
        metrics.request(None, "GET", 200, Duration::from_millis(7));
        metrics.request(None, "POST", 503, Duration::from_secs(60));
        metrics.create_stages(&[Stage::new("store", Duration::from_millis(1))]);
        metrics.proxy_request(200);
        let text = metrics.text(&snapshot()).unwrap();
        let lines = text.lines().filter(|line| !line.starts_with('#')).count();
        let converted = Converter::new(1).convert(&text, 2).unwrap();
        let lines_of = |metric: &Metric| match metric.data.as_ref().unwrap() {
            Data::Gauge(gauge) => gauge.data_points.len(),
            Data::Sum(sum) => sum.data_points.len(),
            // The sum and the count, and the buckets.
            Data::Histogram(histogram) => {
                let points = histogram.data_points.iter();
                points.map(|point| 2 + point.bucket_counts.len()).sum()
            }
        };
        assert_eq!(converted.iter().map(lines_of).sum::<usize>(), lines);
        for metric in &converted {
            let Some(Data::Histogram(histogram)) = &metric.data else {
                continue;
            };
            for point in &histogram.data_points {
                assert_eq!(point.bucket_counts.len(), point.explicit_bounds.len() + 1);
                assert_eq!(point.bucket_counts.iter().sum::<u64>(), point.count, "{}", metric.name);
            }
        }
    }

    #[test]
    fn buckets_are_counted_apart() {
        let metrics = Converter::new(100).convert(TEXT, 200).unwrap();
        let took = of(&metrics, "a_took_seconds");
        assert_eq!(took.unit, "s");
        let Some(Data::Histogram(histogram)) = took.data else {
            panic!()
        };
        assert_eq!(histogram.aggregation_temporality, CUMULATIVE);
        let [x, y] = &histogram.data_points[..] else { panic!() };
        assert_eq!((x.count, x.sum, x.start_time_unix_nano), (6, Some(3.5), 100));
        assert_eq!(
            (&x.bucket_counts[..], &x.explicit_bounds[..]),
            (&[1, 3, 2][..], &[0.5, 1.0][..])
        );
        assert_eq!((y.count, &y.bucket_counts[..]), (0, &[0, 0, 0][..]));
        assert_eq!(text_of(&y.attributes), [("stage".into(), "y".into())]);
    }

    #[test]
    fn what_counts_anew_has_a_new_start() {
        let mut converter = Converter::new(100);
        let mut start = |value: &str, now| {
            let text = format!("# TYPE a counter\na_total {value}\n# TYPE b counter\nb_total 5\n# EOF\n");
            let metrics = converter.convert(&text, now).unwrap();
            let starts = metrics.iter().map(|metric| match &metric.data {
                Some(Data::Sum(sum)) => sum.data_points[0].start_time_unix_nano,
                _ => panic!(),
            });
            starts.collect::<Vec<_>>()
        };
        assert_eq!(start("5", 200), [100, 100]);
        assert_eq!(start("5", 300), [100, 100]);
        assert_eq!(start("2", 400), [300, 100], "it began after the text before");
        assert_eq!(start("9", 500), [300, 100]);
        assert_eq!(start("0", 600), [500, 100]);
    }

    #[test]
    fn what_is_unknown_is_an_error() {
        for (text, line) in [
            ("a 1\n", 1),
            ("# TYPE a summary\n", 1),
            ("# TYPE a gauge\nb 1\n", 2),
            ("# TYPE a gauge\na x\n", 2),
            ("# TYPE a gauge\na{b=\"c} 1\n", 2),
            ("# TYPE a gauge\na{b=\"c\"d=\"e\"} 1\n", 2),
            ("# TYPE a counter\na 1\n", 2),
            ("# TYPE a histogram\na_bucket 1\n", 2),
            ("# TYPE a histogram\na_bucket{le=\"1\"} 2\na_bucket{le=\"+Inf\"} 1\n", 3),
            ("# OTHER a b\n", 1),
            ("\n", 1),
        ] {
            assert_eq!(Converter::new(0).convert(text, 0), Err(Unreadable(line)), "{text}");
        }
    }
}
