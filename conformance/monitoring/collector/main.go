// A collector of OpenTelemetry, with what the tests of exports need of one: it receives by OTLP over HTTP, and Prometheus scrapes
// the metrics that it has received.
package main

import (
	"log"

	"github.com/open-telemetry/opentelemetry-collector-contrib/exporter/prometheusexporter"
	"go.opentelemetry.io/collector/component"
	"go.opentelemetry.io/collector/confmap"
	"go.opentelemetry.io/collector/confmap/provider/fileprovider"
	"go.opentelemetry.io/collector/exporter"
	"go.opentelemetry.io/collector/otelcol"
	"go.opentelemetry.io/collector/receiver"
	"go.opentelemetry.io/collector/receiver/otlpreceiver"
	"go.opentelemetry.io/collector/service/telemetry/otelconftelemetry"
)

func factories() (otelcol.Factories, error) {
	received, sent := otlpreceiver.NewFactory(), prometheusexporter.NewFactory()
	return otelcol.Factories{
		Receivers: map[component.Type]receiver.Factory{received.Type(): received},
		Exporters: map[component.Type]exporter.Factory{sent.Type(): sent},
		Telemetry: otelconftelemetry.NewFactory(),
	}, nil
}

func main() {
	files := confmap.ResolverSettings{ProviderFactories: []confmap.ProviderFactory{fileprovider.NewFactory()}, DefaultScheme: "file"}
	command := otelcol.NewCommand(otelcol.CollectorSettings{
		BuildInfo:              component.BuildInfo{Command: "collector", Description: "for tests", Version: "0"},
		Factories:              factories,
		ConfigProviderSettings: otelcol.ConfigProviderSettings{ResolverSettings: files},
	})
	if err := command.Execute(); err != nil {
		log.Fatal(err)
	}
}
