// Streams a chat answer over Baton's gRPC API.
//
//   chat 127.0.0.1:8001 "Tell me a story about a dog and a river."
#include <grpcpp/grpcpp.h>

#include <iostream>

#include "baton/v1/inference.grpc.pb.h"

using namespace baton::v1;

int main(int argc, char** argv) {
  const std::string address = argc > 1 ? argv[1] : "127.0.0.1:8001";
  const std::string content = argc > 2 ? argv[2] : "Tell me a story about a dog and a river.";

  GenerateRequest request;
  ChatMessage* message = request.mutable_chat()->add_messages();
  message->set_role("user");
  message->set_content(content);
  request.mutable_sampling()->set_temperature(0);
  request.mutable_stop()->set_max_tokens(64);

  auto stub = InferenceService::NewStub(grpc::CreateChannel(address, grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
  auto reader = stub->Generate(&context, request);
  GenerateResponse response;
  while (reader->Read(&response)) {
    std::cout << response.text() << std::flush;
    if (response.has_usage()) {
      std::cerr << "\n" << response.usage().completion_tokens() << " tokens\n";
    }
  }
  const grpc::Status status = reader->Finish();
  if (!status.ok()) {
    std::cerr << status.error_code() << ": " << status.error_message() << "\n";
  }
  return status.ok() ? 0 : 1;
}
