// A client of Baton's gRPC API, made from the same .proto as the server.
import { fileURLToPath } from "node:url";
import grpc from "@grpc/grpc-js";
import protoLoader from "@grpc/proto-loader";

const definition = protoLoader.loadSync("baton/v1/inference.proto", {
  includeDirs: [fileURLToPath(new URL("../../proto", import.meta.url))],
  keepCase: true,
  enums: String,
});
const { InferenceService } = grpc.loadPackageDefinition(definition).baton.v1;

export function inferenceClient(address) {
  return new InferenceService(address, grpc.credentials.createInsecure());
}
