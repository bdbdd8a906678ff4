// The scrape configuration that the Prometheus operator makes of PodMonitors, for the long test of the chart's.
//
// Built by hack/prometheus from the operator's Go module, whose own program runs only in a cluster. Reads a PodMonitor
// as YAML from standard input, and prints the whole configuration of a Prometheus that selects it.
package main

import (
	"fmt"
	"io"
	"os"

	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"sigs.k8s.io/yaml"

	monitoring "github.com/prometheus-operator/prometheus-operator/pkg/apis/monitoring/v1"
	"github.com/prometheus-operator/prometheus-operator/pkg/assets"
	"github.com/prometheus-operator/prometheus-operator/pkg/prometheus"
)

func main() {
	if err := run(); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func run() error {
	text, err := io.ReadAll(os.Stdin)
	if err != nil {
		return err
	}
	var monitor monitoring.PodMonitor
	if err := yaml.UnmarshalStrict(text, &monitor); err != nil {
		return err
	}
	server := &monitoring.Prometheus{ObjectMeta: metav1.ObjectMeta{Name: "any", Namespace: "monitoring"}}
	generator, err := prometheus.NewConfigGenerator(nil, server)
	if err != nil {
		return err
	}
	monitors := map[string]*monitoring.PodMonitor{monitor.Namespace + "/" + monitor.Name: &monitor}
	store := assets.NewStoreBuilder(nil, nil)
	configuration, err := generator.GenerateServerConfiguration(server, nil, monitors, nil, nil, store, nil, nil, nil, nil)
	if err != nil {
		return err
	}
	_, err = os.Stdout.Write(configuration)
	return err
}
