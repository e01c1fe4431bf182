// Prints the problems of the custom resources in a JSON file, one a line. Unknown fields are no problem here.
import { readFileSync } from "node:fs";

const packages = {
  "gateway.networking.k8s.io": "gateway-api",
  "keda.sh": "keda",
  "monitoring.coreos.com": "prometheus-operator",
};

for (const object of JSON.parse(readFileSync(process.argv[2], "utf8"))) {
  const group = object.apiVersion.split("/")[0];
  const name = `@kubernetes-models/${packages[group]}/${object.apiVersion}/${object.kind}`;
  const model = (await import(name))[object.kind];
  try {
    new model(object).validate();
  } catch (error) {
    console.log(`${object.kind} ${object.metadata.name}: ${error.message}`);
  }
}
