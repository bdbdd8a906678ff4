// A container registry that asks everybody for a name and a password: distribution's own handlers over a folder, with
// the name and the password that it finds in its environment. Arguments: the address to listen on, the folder.
package main

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/distribution/distribution/v3/configuration"
	"github.com/distribution/distribution/v3/registry"
	_ "github.com/distribution/distribution/v3/registry/auth/htpasswd"
	_ "github.com/distribution/distribution/v3/registry/storage/driver/filesystem"
	"golang.org/x/crypto/bcrypt"
)

const settings = `version: 0.1
storage: {filesystem: {rootdirectory: %s}}
auth: {htpasswd: {realm: registry, path: %s}}
http: {addr: %s}
`

func main() {
	if err := serve(os.Args[1], os.Args[2]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}

func serve(address, folder string) error {
	hash, err := bcrypt.GenerateFromPassword([]byte(os.Getenv("REGISTRY_PASSWORD")), bcrypt.MinCost)
	if err != nil {
		return err
	}
	users := filepath.Join(folder, "users")
	line := fmt.Sprintf("%s:%s\n", os.Getenv("REGISTRY_USER"), hash)
	if err := os.WriteFile(users, []byte(line), 0o600); err != nil {
		return err
	}
	text := fmt.Sprintf(settings, filepath.Join(folder, "store"), users, address)
	config, err := configuration.Parse(strings.NewReader(text))
	if err != nil {
		return err
	}
	server, err := registry.NewRegistry(context.Background(), config)
	if err != nil {
		return err
	}
	return server.ListenAndServe()
}
