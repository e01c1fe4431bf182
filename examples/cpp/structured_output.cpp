// Asks for an answer that a JSON schema describes; every answer that ends is such a document.
//
//   structured_output 127.0.0.1:8001
#include <grpcpp/grpcpp.h>

#include <iostream>

#include "baton/v1/inference.grpc.pb.h"

using namespace baton::v1;

constexpr char kSchema[] = R"({
  "type": "object",
  "properties": {
    "hero": {"type": "string", "maxLength": 20},
    "age": {"type": "integer", "minimum": 1, "maximum": 99},
    "friend": {"enum": ["cat", "dog", "bird"]}
  },
  "required": ["hero", "age", "friend"],
  "additionalProperties": false
})";

int main(int argc, char** argv) {
  GenerateRequest request;
  ChatMessage* message = request.mutable_chat()->add_messages();
  message->set_role("user");
  message->set_content("Who is in the story?");
  request.mutable_constraint()->set_json_schema(kSchema);
  request.mutable_constraint()->set_no_whitespace(true);
  request.mutable_sampling()->set_temperature(0);
  request.mutable_stop()->set_max_tokens(200);

  const std::string address = argc > 1 ? argv[1] : "127.0.0.1:8001";
  auto stub = InferenceService::NewStub(grpc::CreateChannel(address, grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
  auto reader = stub->Generate(&context, request);
  GenerateResponse response;
  while (reader->Read(&response)) {
    std::cout << response.text();
  }
  std::cout << "\n";
  const grpc::Status status = reader->Finish();
  if (!status.ok()) {
    std::cerr << status.error_code() << ": " << status.error_message() << "\n";
  }
  return status.ok() ? 0 : 1;
}
